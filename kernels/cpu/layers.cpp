// The layers of a model other than matrix products and attention: normalisation, rotation, activation.

#include <cmath>

#include "kernels.hpp"
#include "parallel.hpp"
#include "vector.hpp"

constexpr int64_t FEW = 1 << 14;  // numbers below which starting a helper thread takes longer than the work

extern "C" {

// RMSNorm of `count` heads in each of `rows` rows, which are `stride` numbers apart. A `delta`, contiguous
// [rows, count, width] or null, is added to x first.
void rms_norm(float* x, int64_t stride, const float* delta, const float* weight, float eps, float* out,
              int64_t out_stride, int64_t rows, int64_t count, int64_t width, int threads) {
    parallel(rows * count, FEW / width, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            float *in = x + i / count * stride + i % count * width, *to = out + i / count * out_stride + i % count * width;
            Vec squares = {};
            for (int64_t j = 0; j < width; j += LANES) {
                Vec v = load_some(in + j, width - j);
                if (delta) store_some(in + j, v += load_some(delta + i * width + j, width - j), width - j);
                squares += v * v;
            }
            float scale = 1.0f / std::sqrt(sum(squares) / width + eps);
            for (int64_t j = 0; j < width; j += LANES)
                store_some(to + j, load_some(in + j, width - j) * scale * load_some(weight + j, width - j), width - j);
        }
    });
}

// Rotates the pairs (j, j + dim / 2) of each head in place. A row of `table` [positions, dim] is cosines, then sines.
void rotate(float* x, int64_t stride, const float* table, const int64_t* positions, int64_t rows, int64_t heads,
            int64_t dim, int threads) {
    int64_t half = dim / 2;
    parallel(rows * heads, FEW / dim, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            float *left = x + i / heads * stride + i % heads * dim, *right = left + half;
            const float *cosines = table + positions[i / heads] * dim, *sines = cosines + half;
            for (int64_t j = 0; j < half; j += LANES) {
                Vec a = load_some(left + j, half - j), b = load_some(right + j, half - j);
                Vec cosine = load_some(cosines + j, half - j), sine = load_some(sines + j, half - j);
                store_some(left + j, a * cosine - b * sine, half - j);
                store_some(right + j, b * cosine + a * sine, half - j);
            }
        }
    });
}

// SiLU of the first half of each row times the second half: [rows, 2 * width] -> [rows, width].
void silu_mul(const float* x, float* out, int64_t rows, int64_t width, int threads) {
    parallel(rows, FEW / width, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const float *gate = x + 2 * i * width, *up = gate + width;
            for (int64_t j = 0; j < width; j += LANES) {
                Vec g = load_some(gate + j, width - j);
                store_some(out + i * width + j, g / (exponential(-g) + 1.0f) * load_some(up + j, width - j), width - j);
            }
        }
    });
}
}
