// Matrix products with weights in floating point, accumulated in float32.
//
// A panel stores the weights of its outputs input by input, so that the innermost loop loads two registers and
// multiplies them with one number of each row. Every output is summed in the order of the inputs for any number of rows,
// so that a row's result does not depend on the other rows.
//
// Where the CPU multiplies pairs of bf16 numbers, rows are rounded to bf16 for weights in bf16, and an input is a pair;
// where it multiplies tiles, see tiles.hpp.
#pragma once

#include "product.hpp"
#include "tiles.hpp"

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

constexpr int64_t PREFETCHED_INPUTS = 8;  // inputs whose weights are prefetched at a time; with few rows it is one

struct PrefetchPlans {
    PrefetchPlan few, many;  // plans for tiles of few rows, and of many

    PrefetchPlans(int64_t bytes, int64_t inputs, int64_t parts)
        : few(bytes, inputs, parts, PREFETCH_BYTES),
          many(bytes, (inputs + PREFETCHED_INPUTS - 1) / PREFETCHED_INPUTS, parts, PREFETCH_BYTES) {}
};

// Multiplies the rows M of a tile. Constant indices let the compiler keep all sums in registers. `inputs` counts pairs if X
// is a pair, here and below. Inlined, because with few inputs a call takes a tenth of a tile.
template <typename X, typename W, typename Target, size_t... M>
INLINED inline void multiply(const Tile& tile, const X* x, const W* panels, int64_t inputs, const PrefetchPlans& plans,
                             Target& target, std::index_sequence<M...> rows) {
    constexpr bool FEW_ROWS = sizeof...(M) <= 4;
    const W* panel = panels + tile.panel * inputs * PANEL;
    Prefetcher ahead(tile, panels, FEW_ROWS ? plans.few : plans.many);
    Vec left[] = {(M, Vec{})...}, right[] = {(M, Vec{})...};
    auto step = [&] INLINED {
        auto [l, r] = load_weights(panel);
        ((left[M] = add_product(left[M], x[M * inputs], l), right[M] = add_product(right[M], x[M * inputs], r)), ...);
        x++, panel += PANEL;
    };
    if constexpr (FEW_ROWS) ahead.each_step<PANEL * sizeof(W)>(step);
    else for (int64_t k = 0; k < inputs; k++) {
        if (k % PREFETCHED_INPUTS == 0) ahead.step();
        step();
    }
    finish(tile, left, right, target, rows);
}

template <int M = ROWS, typename X, typename W, typename Target>
INLINED inline void multiply_rows(int64_t rows, const Tile& tile, const X* x, const W* panels, int64_t inputs,
                                  const PrefetchPlans& plans, Target& target) {
    if (rows == M) return multiply(tile, x, panels, inputs, plans, target, std::make_index_sequence<M>());
    if constexpr (M > 1) multiply_rows<M - 1>(rows, tile, x, panels, inputs, plans, target);
}

template <typename W, typename X, typename Target>
void multiply_floats(const X* x, int64_t inputs, const Weights& weights, Target& target, int64_t rows, int threads) {
    int64_t bytes = inputs * PANEL * sizeof(W);
    PrefetchPlans plans(bytes, inputs, (rows + ROWS - 1) / ROWS);
    for_tiles(weights, rows, ROWS, CACHED_BYTES / bytes, target, threads, [&](const Tile& tile, int64_t count) {
        multiply_rows(count, tile, x + tile.row * inputs, (const W*)weights.panels, inputs, plans, target);
    });
}

#if defined(__AVX512BF16__)

// Rounds a row to `pairs` pairs, the last ones of which are zeros.
inline void round_row(const float* x, int64_t inputs, Pair* rounded, int64_t pairs) {
    for (int64_t k = 0; k < 2 * pairs; k += LANES)
        store((Bf16*)rounded + k, load_some(x + k, std::max<int64_t>(inputs - k, 0)));
}

#endif

template <typename Target>
void multiply_bf16(const float* x, const Weights& weights, Target& target, int64_t rows, int threads) {
    int64_t inputs = weights.inputs;
#if defined(__AVX512BF16__)
    int64_t pairs = (inputs + DEPTH - 1) / DEPTH * DEPTH / 2;
    std::unique_ptr<Pair[]> rounded(new Pair[rows * pairs]);
    parallel(rows, SERIAL_NUMBERS / inputs, threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) round_row(x + row * inputs, inputs, &rounded[row * pairs], pairs);
    });
#if defined(__AMX_BF16__)
    if (tiles_allowed()) return multiply_tiles(rounded.get(), pairs, weights, target, rows, threads);
#endif
    multiply_floats<Pair>((const Pair*)rounded.get(), pairs, weights, target, rows, threads);
#else
    multiply_floats<Bf16>(x, inputs, weights, target, rows, threads);
#endif
}
