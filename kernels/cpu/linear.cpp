// Matrix products with packed weights, accumulated in float32.
//
// Outputs are cut into panels of two registers. A panel stores the weights of its outputs input by input, so that the
// innermost loop loads two registers and multiplies them with one number of each row. Every output is summed in the
// order of the inputs for any number of rows, so that a row's result does not depend on the other rows.
//
// Where the CPU multiplies pairs of bf16 numbers, rows are rounded to bf16 for weights in bf16, and an input is a pair.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>
#include <vector>

#include "kernels.hpp"
#include "parallel.hpp"
#include "vector.hpp"

namespace {

constexpr int PANEL = 2 * LANES;
constexpr int AHEAD = 8192;  // prefetch distance, bytes
constexpr int64_t SMALL = 1 << 17;  // multiplications below which starting a helper thread takes longer than the work
constexpr int64_t CACHED = 1 << 15;  // weights of panels that are kept in the level 2 cache
constexpr int64_t CHUNKS = 16;  // chunks of outputs per thread
constexpr int64_t ROUNDED = 1 << 14;  // numbers below which starting a helper thread takes longer than rounding them

// Loads two registers of weights, in the layout of `CpuKernels.pack`: one after the other.
template <typename W>
inline auto load_weights(const W* p) {
    return std::pair(load(p), load(p + LANES));
}

// Weights in bf16 that are widened alternate between the two registers, so that one register is a shift and the other a
// mask.
inline auto load_weights(const Bf16* p) {
    Int both;
    std::memcpy(&both, p, sizeof both);
    return std::pair((Vec)(both << 16), (Vec)(both & (int32_t)0xffff0000));
}

// The outputs of one panel for some rows.
struct Tile {
    const float* bias;  // or null
    int64_t row, first;
    int64_t columns;  // number of outputs, at most PANEL
    int64_t chunk;    // index of the tile's chunk
};

// Target that writes every output.
struct Whole {
    float* out;
    int64_t outputs;

    void prepare(int64_t) {}

    bool wants(const Tile&, int64_t, Vec, Vec) const { return true; }

    void take(const Tile& tile, int64_t m, Vec left, Vec right) {
        float* row = place(tile, m);
        store(row, left);
        store(row + LANES, right);
    }

    void take_some(const Tile& tile, int64_t m, Vec left, Vec right) {
        Vec both[] = {left, right};
        std::memcpy(place(tile, m), both, tile.columns * sizeof(float));
    }

    float* place(const Tile& tile, int64_t m) { return out + (tile.row + m) * outputs + tile.first; }
};

// The largest output, the first of equal ones. NaN counts as infinity.
struct Peak {
    float most = -INFINITE;
    int64_t at = 0;
};

// Target that only keeps the largest output of each row and writes none.
class Largest {
public:
    explicit Largest(int64_t rows) : rows(rows), bars(new std::atomic<float>[rows]) {
        for (int64_t row = 0; row < rows; row++) bars[row] = -INFINITE;
    }

    void prepare(int64_t chunks) { peaks.resize(rows * chunks); }

    // Nearly all outputs are less than an earlier one of the row, by any thread.
    bool wants(const Tile& tile, int64_t m, Vec left, Vec right) const {
        return !all_less(left, right, splat(bars[tile.row + m].load(std::memory_order_relaxed)));
    }

    void take(const Tile& tile, int64_t m, Vec left, Vec right) {
        if (wants(tile, m, left, right)) keep(tile, m, left, right);
    }

    void take_some(const Tile& tile, int64_t m, Vec left, Vec right) {
        Vec both[] = {left, right};
        for (int64_t i = tile.columns; i < PANEL; i++) both[i / LANES][i % LANES] = -INFINITE;
        take(tile, m, both[0], both[1]);
    }

    int64_t at(int64_t row) const {
        Peak best = peaks[row];
        for (size_t i = row + rows; i < peaks.size(); i += rows)
            if (peaks[i].most > best.most) best = peaks[i];
        return std::abs(best.most) < INFINITE ? best.at : NOT_FINITE;
    }

private:
    // When threads raise a bar at the same time, the lower value may stay, which is only less strict.
    [[gnu::noinline]] void keep(const Tile& tile, int64_t m, Vec left, Vec right) {
        Vec both[] = {countable(left), countable(right)};
        float most = largest(larger(both[0], both[1]));
        Peak& best = peaks[tile.chunk * rows + tile.row + m];
        if (most <= best.most) return;
        int64_t i = 0;
        while (both[i / LANES][i % LANES] != most) i++;
        best = {most, tile.first + i};
        std::atomic<float>& bar = bars[tile.row + m];
        bar.store(std::max(bar.load(std::memory_order_relaxed), most), std::memory_order_relaxed);
    }

    static Vec countable(Vec v) { return v != v ? splat(INFINITE) : v; }

    int64_t rows;
    std::unique_ptr<std::atomic<float>[]> bars;  // lower bound of the largest output of each row so far
    std::vector<Peak> peaks;  // [chunks, rows]
};

// Multiplies the rows M of a tile. Constant indices let the compiler keep all sums in registers.
template <typename X, typename W, typename Target, size_t... M>
void multiply(const Tile& tile, const X* x, const W* panel, int64_t inputs, Target& target, std::index_sequence<M...>) {
    constexpr bool FEW = sizeof...(M) <= 4;  // then memory bandwidth is the limit for every dtype
    Vec left[] = {(M, Vec{})...}, right[] = {(M, Vec{})...};
    for (int64_t k = 0; k < inputs; k++, x++, panel += PANEL) {
        // Hardware prefetchers do not look far enough ahead.
        if constexpr (FEW || sizeof(W) < 4) __builtin_prefetch((const char*)panel + AHEAD);
        if constexpr (FEW && sizeof(W) == 4) __builtin_prefetch((const char*)panel + AHEAD + 64);
        auto [l, r] = load_weights(panel);
        ((left[M] = add_product(left[M], x[M * inputs], l), right[M] = add_product(right[M], x[M * inputs], r)), ...);
    }
    if (tile.bias) {
        Vec l = load(tile.bias), r = load(tile.bias + LANES);
        ((left[M] += l, right[M] += r), ...);
    }
    if (tile.columns < PANEL) (target.take_some(tile, M, left[M], right[M]), ...);
    // One test for all rows, because the result is nearly always false.
    else if ((target.wants(tile, M, left[M], right[M]) | ...)) (target.take(tile, M, left[M], right[M]), ...);
}

template <int M = ROWS, typename X, typename W, typename Target>
void multiply_rows(int64_t rows, const Tile& tile, const X* x, const W* panel, int64_t inputs, Target& target) {
    if (rows == M) return multiply(tile, x, panel, inputs, target, std::make_index_sequence<M>());
    if constexpr (M > 1) multiply_rows<M - 1>(rows, tile, x, panel, inputs, target);
}

template <typename X, typename W, typename Target>
void product(const X* x, const W* packed, const float* bias, Target& target, int64_t rows, int64_t inputs,
             int64_t outputs, int threads) {
    int64_t panels = (outputs + PANEL - 1) / PANEL, parts = (rows + ROWS - 1) / ROWS, size = inputs * PANEL;
    // Panels that fit into the cache are computed together, so that a row's outputs are written in longer runs.
    int64_t run = std::max<int64_t>(1, CACHED / size), runs = (panels + run - 1) / run;
    int64_t chunks = std::min(runs, CHUNKS * threads);
    int64_t groups = chunks < threads ? std::min(parts, CHUNKS * threads) : 1;  // of rows, if there are few outputs
    if (rows * panels * size < SMALL) threads = 1;
    target.prepare(chunks);

    auto multiply_run = [&](int64_t chunk, int64_t group, int64_t begin, int64_t end) {
        for (int64_t part = parts * group / groups; part < parts * (group + 1) / groups; part++) {
            int64_t row = rows * part / parts, count = rows * (part + 1) / parts - row;
            for (int64_t p = begin; p < end; p++) {
                int64_t first = p * PANEL;
                Tile tile = {bias ? bias + first : nullptr, row, first, std::min<int64_t>(PANEL, outputs - first), chunk};
                multiply_rows(count, tile, x + row * inputs, packed + p * size, inputs, target);
            }
        }
    };
    parallel(chunks * groups, 1, threads, [&](int64_t from, int64_t to) {
        for (int64_t at = from; at < to; at++) {
            int64_t chunk = at / groups;
            for (int64_t i = runs * chunk / chunks; i < runs * (chunk + 1) / chunks; i++)
                multiply_run(chunk, at % groups, i * run, std::min((i + 1) * run, panels));
        }
    });
}

template <typename Target>
void product(const float* x, const Bf16* packed, const float* bias, Target& target, int64_t rows, int64_t inputs,
             int64_t outputs, int threads) {
#if defined(__AVX512BF16__)
    int64_t pairs = (inputs + 1) / 2;
    std::unique_ptr<Pair[]> rounded(new Pair[rows * pairs]);
    parallel(rows, ROUNDED / inputs, threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            Pair* out = &rounded[row * pairs];
            out[pairs - 1] = {0};
            for (int64_t k = 0; k < inputs; k += LANES)
                store_some((Bf16*)out + k, load_some(x + row * inputs + k, inputs - k), std::min<int64_t>(LANES, inputs - k));
        }
    });
    product((const Pair*)rounded.get(), (const Pair*)packed, bias, target, rows, pairs, outputs, threads);
#else
    product<float, Bf16>(x, packed, bias, target, rows, inputs, outputs, threads);
#endif
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

// Returns how many inputs of a bf16 weight are stored side by side.
int64_t paired() { return PAIRED; }

void linear(const float* x, const void* packed, int dtype, const float* bias, float* out, int64_t rows, int64_t inputs,
            int64_t outputs, int threads) {
    Whole target = {out, outputs};
    multiply_into(target, x, packed, dtype, bias, rows, inputs, outputs, threads);
}

// Finds the largest output of each row, like `sample` at temperature 0; `NOT_FINITE` if there is none.
void linear_argmax(const float* x, const void* packed, int dtype, const float* bias, int64_t* at, int64_t rows,
                   int64_t inputs, int64_t outputs, int threads) {
    Largest target(rows);
    multiply_into(target, x, packed, dtype, bias, rows, inputs, outputs, threads);
    for (int64_t row = 0; row < rows; row++) at[row] = target.at(row);
}
}
