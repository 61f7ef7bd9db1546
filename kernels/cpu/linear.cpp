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
    int64_t inputs, outputs;  // of the whole product
    int64_t columns;  // outputs of this tile, at most PANEL
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
            store_some(tile.out + m * tile.outputs + first, sum, count);
        }
}

template <typename W, int M = ROWS>
void multiply_rows(int64_t rows, const Tile& tile, const W* panel) {
    if (rows == M) return multiply<M>(tile, panel);
    if constexpr (M > 1) multiply_rows<W, M - 1>(rows, tile, panel);
}

template <typename W>
void product(const float* x, const W* packed, const float* bias, float* out, int64_t rows, int64_t inputs,
             int64_t outputs, int threads) {
    int64_t panels = (outputs + PANEL - 1) / PANEL, parts = (rows + ROWS - 1) / ROWS, size = inputs * PANEL;
    // Panels that stay in the cache together are taken together: a row's outputs are written in longer runs.
    int64_t run = std::max<int64_t>(1, std::min(CACHED / size, panels / (4 * threads)));
    bool widen = parts > 1 && sizeof(W) < sizeof(float);  // once, not for every tile of rows
    if (rows * panels * size < SMALL) threads = 1;
    parallel((panels + run - 1) / run, 1, threads, [&](int64_t from, int64_t to) {
        static thread_local std::vector<float> wide;
        if (widen) wide.resize(std::max<size_t>(wide.size(), run * size));
        for (int64_t begin = from * run; begin < std::min(to * run, panels); begin += run) {
            int64_t end = std::min(begin + run, panels);
            const W* some = packed + begin * size;
            for (int64_t i = 0; widen && i < (end - begin) * size; i += LANES) store(&wide[i], load(some + i));
            for (int64_t part = 0; part < parts; part++) {
                int64_t row = rows * part / parts, count = rows * (part + 1) / parts - row;
                for (int64_t p = begin; p < end; p++) {
                    int64_t first = p * PANEL, offset = (p - begin) * size;
                    Tile tile = {x + row * inputs, bias ? bias + first : nullptr, out + row * outputs + first,
                                 inputs, outputs, std::min<int64_t>(PANEL, outputs - first)};
                    if (widen) multiply_rows(count, tile, &wide[offset]);
                    else multiply_rows(count, tile, some + offset);
                }
            }
        }
    });
}

}  // namespace

extern "C" {

int64_t panel_width() { return PANEL; }

void linear(const float* x, const void* packed, int dtype, const float* bias, float* out, int64_t rows, int64_t inputs,
            int64_t outputs, int threads) {
    if (dtype == BF16) product(x, (const Bf16*)packed, bias, out, rows, inputs, outputs, threads);
    else if (dtype == F16) product(x, (const _Float16*)packed, bias, out, rows, inputs, outputs, threads);
    else product(x, (const float*)packed, bias, out, rows, inputs, outputs, threads);
}
}
