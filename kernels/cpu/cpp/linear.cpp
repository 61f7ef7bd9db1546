// Matrix products with packed weights of any kind.

#include "floats.hpp"
#include "integers.hpp"
#include "product.hpp"

namespace {

template <typename Target>
void multiply_into(Target& target, const float* x, const Weights& weights, int64_t rows, int threads) {
    switch (weights.kind) {
    case F32: return multiply_floats<float>(x, weights.inputs, weights, target, rows, threads);
    case F16: return multiply_floats<Fp16>(x, weights.inputs, weights, target, rows, threads);
    case BF16: return multiply_bf16(x, weights, target, rows, threads);
    case INT4: return multiply_integers<4>(x, weights, target, rows, threads);
    case INT5: return multiply_integers<5>(x, weights, target, rows, threads);
    case INT6: return multiply_integers<6>(x, weights, target, rows, threads);
    case INT8: return multiply_integers<8>(x, weights, target, rows, threads);
    }
}

}  // namespace

extern "C" {

// Returns how many inputs of a bf16 weight are stored side by side.
int64_t paired() { return PAIRED; }

// Returns the number to a multiple of which the inputs of bf16 weights are padded.
int64_t depth() { return DEPTH; }

// Returns whether products in bf16 are computed in tiles.
int64_t tiled() {
#if defined(__AMX_BF16__)
    return tiles_allowed();
#else
    return 0;
#endif
}

void linear(const float* x, const Weights* parts, int64_t count, float* out, int64_t rows, int64_t stride, int threads) {
    for (int64_t i = 0; i < count; out += parts[i++].outputs) {
        AllOutputs target = {out, stride};
        multiply_into(target, x, parts[i], rows, threads);
    }
}

// Finds the largest output of each row, like `sample` at temperature 0; `NOT_FINITE` if there is none. Writes its value to
// `most`, unless that is null.
void linear_argmax(const float* x, const Weights* weights, int64_t* at, float* most, int64_t rows, int threads) {
    LargestOutput target(rows);
    multiply_into(target, x, *weights, rows, threads);
    for (int64_t row = 0; row < rows; row++) {
        Peak peak = target.of(row);
        at[row] = peak.at;
        if (most) most[row] = peak.most;
    }
}
}
