// Matrix products with weights packed once, and accumulated in float32.
//
// The outputs are cut into panels of two registers. A panel holds, input by input, the weights of its outputs, so that
// the innermost loop loads two registers and multiplies them with one number of each row. Every output is summed in the
// order of the inputs, however many rows there are: a row's result does not depend on its neighbours.

#include <algorithm>
#include <vector>

#include "kernels.hpp"
#include "parallel.hpp"
#include "vector.hpp"

namespace {

constexpr int PANEL = 2 * LANES;
constexpr int AHEAD = 4096;  // bytes
constexpr int64_t SMALL = 1 << 17;  // multiplications that are done before a helper has begun
constexpr int64_t CACHED = 1 << 16;  // floats that may take part of the second level cache

struct Tile {
    const float* x;  // the first of its rows
    const float* bias;  // of its columns, or null
    float* out;
    int64_t inputs, stride;  // of a row of x, and of out
    int64_t columns;  // outputs of this tile, at most PANEL
};

// Some rows and some neighbouring outputs, which are computed together.
struct Block {
    int64_t number, row, rows, first, columns;  // its number counts the outputs' part only
};

struct Place {
    float* out;
    int64_t stride;
};

// Every output is wanted.
struct Whole {
    float* out;
    int64_t outputs;

    void prepare(int64_t) {}
    Place open(const Block& block) { return {out + block.row * outputs + block.first, outputs}; }
    void close(const Block&, Place) {}
};

struct Peak {
    float value = -INFINITE;
    int64_t at = 0;
};

// The first of the largest. A NaN counts as the lowest finite number, infinity as the largest.
Peak peak(const float* x, int64_t count, int64_t first) {
    Vec most = splat(-INFINITE);
    Int at = {}, here;
    for (int l = 0; l < LANES; l++) here[l] = l;
    for (int64_t i = 0; i < count; i += LANES, here += LANES) {
        Vec v = splat(-INFINITE);
        if (count - i >= LANES) v = load(x + i);
        else std::memcpy(&v, x + i, (count - i) * sizeof(float));
        v = v != v ? splat(LOWEST) : v > -LOWEST ? splat(-LOWEST) : v;
        Int better = v > most;
        most = better ? v : most;
        at = better ? here : at;
    }
    Peak best = {most[0], at[0]};
    for (int l = 1; l < LANES; l++)
        if (most[l] > best.value || (most[l] == best.value && at[l] < best.at)) best = {most[l], at[l]};
    return {best.value, best.at + first};
}

// Only the largest output of a row is wanted: the others never leave the cache.
class Largest {
public:
    explicit Largest(int64_t rows) : rows(rows) {}

    void prepare(int64_t blocks) { peaks.resize(rows * blocks); }

    Place open(const Block& block) {
        static thread_local std::vector<float> some;
        some.resize(std::max<size_t>(some.size(), block.rows * block.columns));
        return {some.data(), block.columns};
    }

    void close(const Block& block, Place place) {
        for (int64_t m = 0; m < block.rows; m++)
            peaks[block.number * rows + block.row + m] = peak(place.out + m * place.stride, block.columns, block.first);
    }

    int64_t at(int64_t row) const {
        Peak best = peaks[row];
        for (size_t i = row; i < peaks.size(); i += rows)
            if (peaks[i].value > best.value) best = peaks[i];
        return best.at;
    }

private:
    int64_t rows;
    std::vector<Peak> peaks;  // block by block
};

template <int M, typename W>
void multiply(const Tile& tile, const W* panel) {
    Vec sums[M][2] = {};
    for (int64_t k = 0; k < tile.inputs; k++, panel += PANEL) {
        // With few rows memory is the limit, and its own prefetchers do not look far enough ahead.
        if constexpr (M <= 4) __builtin_prefetch((const char*)panel + AHEAD);
        if constexpr (M <= 4 && sizeof(W) == 4) __builtin_prefetch((const char*)panel + AHEAD + 64);
        Vec left = load(panel), right = load(panel + LANES);
        for (int m = 0; m < M; m++) {
            sums[m][0] += tile.x[m * tile.inputs + k] * left;
            sums[m][1] += tile.x[m * tile.inputs + k] * right;
        }
    }
    for (int m = 0; m < M; m++)
        for (int64_t i = 0, first = 0; first < tile.columns; i++, first += LANES) {
            int64_t count = std::min<int64_t>(LANES, tile.columns - first);
            Vec sum = tile.bias ? sums[m][i] + load_some(tile.bias + first, count) : sums[m][i];
            store_some(tile.out + m * tile.stride + first, sum, count);
        }
}

template <typename W, int M = ROWS>
void multiply_rows(int64_t rows, const Tile& tile, const W* panel) {
    if (rows == M) return multiply<M>(tile, panel);
    if constexpr (M > 1) multiply_rows<W, M - 1>(rows, tile, panel);
}

template <typename W, typename Target>
void product(const float* x, const W* packed, const float* bias, Target& target, int64_t rows, int64_t inputs,
             int64_t outputs, int threads) {
    int64_t panels = (outputs + PANEL - 1) / PANEL, parts = (rows + ROWS - 1) / ROWS, size = inputs * PANEL;
    // Panels that stay in the cache together are taken together: a row's outputs are written in longer runs.
    int64_t run = std::max<int64_t>(1, std::min(CACHED / size, panels / (4 * threads)));
    bool widen = parts > 1 && sizeof(W) < sizeof(float);  // once, not for every tile of rows
    if (rows * panels * size < SMALL) threads = 1;
    target.prepare((panels + run - 1) / run);
    parallel((panels + run - 1) / run, 1, threads, [&](int64_t from, int64_t to) {
        static thread_local std::vector<float> wide;
        if (widen) wide.resize(std::max<size_t>(wide.size(), run * size));
        for (int64_t begin = from * run; begin < std::min(to * run, panels); begin += run) {
            int64_t end = std::min(begin + run, panels);
            const W* some = packed + begin * size;
            for (int64_t i = 0; widen && i < (end - begin) * size; i += LANES) store(&wide[i], load(some + i));
            for (int64_t part = 0; part < parts; part++) {
                int64_t row = rows * part / parts, count = rows * (part + 1) / parts - row, first = begin * PANEL;
                Block block = {begin / run, row, count, first, std::min(end * PANEL, outputs) - first};
                Place place = target.open(block);
                for (int64_t p = begin; p < end; p++) {
                    int64_t offset = (p - begin) * size, column = (p - begin) * PANEL;
                    Tile tile = {x + row * inputs, bias ? bias + first + column : nullptr, place.out + column,
                                 inputs, place.stride, std::min<int64_t>(PANEL, block.columns - column)};
                    if (widen) multiply_rows(count, tile, &wide[offset]);
                    else multiply_rows(count, tile, some + offset);
                }
                target.close(block, place);
            }
        }
    });
}

template <typename Target>
void multiply_into(Target& target, const float* x, const void* packed, int dtype, const float* bias, int64_t rows,
                   int64_t inputs, int64_t outputs, int threads) {
    if (dtype == BF16) product(x, (const Bf16*)packed, bias, target, rows, inputs, outputs, threads);
    else if (dtype == F16) product(x, (const _Float16*)packed, bias, target, rows, inputs, outputs, threads);
    else product(x, (const float*)packed, bias, target, rows, inputs, outputs, threads);
}

}  // namespace

extern "C" {

int64_t panel_width() { return PANEL; }

void linear(const float* x, const void* packed, int dtype, const float* bias, float* out, int64_t rows, int64_t inputs,
            int64_t outputs, int threads) {
    Whole target = {out, outputs};
    multiply_into(target, x, packed, dtype, bias, rows, inputs, outputs, threads);
}

// Which output of each row is the largest, as `sample` finds it at temperature 0.
void linear_argmax(const float* x, const void* packed, int dtype, const float* bias, int64_t* at, int64_t rows,
                   int64_t inputs, int64_t outputs, int threads) {
    Largest target(rows);
    multiply_into(target, x, packed, dtype, bias, rows, inputs, outputs, threads);
    for (int64_t row = 0; row < rows; row++) at[row] = target.at(row);
}
}
