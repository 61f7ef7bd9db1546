// The layers of a model other than matrix products and attention: normalisation, rotation, activation.

#include <cmath>

#include "kernels.hpp"
#include "parallel.hpp"
#include "vector.hpp"

// LayerNorm of a row with this mean. The deviations are squared in a pass of their own: the difference of two large sums
// would lose the variance.
static void center(const float* x, float* out, float mean, Norm norm, float eps, int64_t width) {
    Vec squares = {};
    for (int64_t j = 0; j < width; j += LANES) {
        Vec v = load_some(x + j, width - j) - mean;
        if (width - j < LANES) {
            float some[LANES] = {};  // padding would deviate too
            store_some(some, v, width - j);
            v = load(some);
        }
        squares += v * v;
    }
    float scale = 1.0f / std::sqrt(sum(squares) / width + eps);
    for (int64_t j = 0; j < width; j += LANES) {
        int64_t left = width - j;
        Vec v = (load_some(x + j, left) - mean) * scale;
        store_some(out + j, v * load_some(norm.weight + j, left) + load_some(norm.bias + j, left), left);
    }
}

template <typename Function>
static void activate(const float* x, float* out, Function function, bool gated, int64_t rows, int64_t width, int threads) {
    parallel(rows, SERIAL_NUMBERS / width, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const float *in = x + i * width * (gated ? 2 : 1), *up = in + width;
            for (int64_t j = 0; j < width; j += LANES) {
                Vec v = function(load_some(in + j, width - j));
                store_some(out + i * width + j, gated ? v * load_some(up + j, width - j) : v, width - j);
            }
        }
    });
}

static Vec silu(Vec x) { return x / (exponential(-x) + 1.0f); }

// Source: Hendrycks and Gimpel, 2016.
static Vec gelu_tanh(Vec x) { return x / (exponential(-1.5957691216f * x * (1.0f + 0.044715f * x * x)) + 1.0f); }

// The error function has an error of at most 1.5e-7. Source: Abramowitz and Stegun, 1964, 7.1.26.
static Vec gelu(Vec x) {
    Vec size = larger(x, -x) * 0.70710678f;
    Vec t = 1.0f / (1.0f + 0.3275911f * size);
    Vec p = splat(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    Vec beyond = 0.5f * p * t * exponential(-size * size);  // share of the normal distribution beyond |x|
    return x * (x < 0.0f ? beyond : 1.0f - beyond);
}

static Vec relu(Vec x) { return x < 0.0f ? Vec{} : x; }

extern "C" {

// Normalises `count` heads in each of `rows` rows, which are `stride` numbers apart: by RMSNorm, or by LayerNorm if there
// is a bias. A `delta`, contiguous [rows, count, width] or null, is added to x first.
void normalize(float* x, int64_t stride, const float* delta, Norm norm, float eps, float* out, int64_t out_stride,
               int64_t rows, int64_t count, int64_t width, int threads) {
    parallel(rows * count, SERIAL_NUMBERS / width, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            float *in = x + i / count * stride + i % count * width, *to = out + i / count * out_stride + i % count * width;
            Vec squares = {}, sums = {};
            for (int64_t j = 0; j < width; j += LANES) {
                Vec v = load_some(in + j, width - j);
                if (delta) store_some(in + j, v += load_some(delta + i * width + j, width - j), width - j);
                squares += v * v;
                sums += v;
            }
            if (norm.bias) {
                center(in, to, sum(sums) / width, norm, eps, width);
                continue;
            }
            float scale = 1.0f / std::sqrt(sum(squares) / width + eps);
            for (int64_t j = 0; j < width; j += LANES)
                store_some(to + j, load_some(in + j, width - j) * scale * load_some(norm.weight + j, width - j), width - j);
        }
    });
}

// Adds `delta` [rows, width] to x, both contiguous.
void add(float* x, const float* delta, int64_t rows, int64_t width, int threads) {
    parallel(rows, SERIAL_NUMBERS / width, threads, [&](int64_t begin, int64_t end) {
        for (int64_t j = begin * width, last = end * width; j < last; j += LANES)
            store_some(x + j, load_some(x + j, last - j) + load_some(delta + j, last - j), last - j);
    });
}

// Rotates the pairs (j, j + rotated / 2) of the first `rotated` numbers of each head in place. A row of `table`
// [positions, rotated] is cosines, then sines.
void rotate(float* x, int64_t stride, const float* table, const int64_t* positions, int64_t rows, int64_t heads,
            int64_t dim, int64_t rotated, int threads) {
    int64_t half = rotated / 2;
    parallel(rows * heads, SERIAL_NUMBERS / dim, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            float *left = x + i / heads * stride + i % heads * dim, *right = left + half;
            const float *cosines = table + positions[i / heads] * rotated, *sines = cosines + half;
            for (int64_t j = 0; j < half; j += LANES) {
                Vec a = load_some(left + j, half - j), b = load_some(right + j, half - j);
                Vec cosine = load_some(cosines + j, half - j), sine = load_some(sines + j, half - j);
                store_some(left + j, a * cosine - b * sine, half - j);
                store_some(right + j, b * cosine + a * sine, half - j);
            }
        }
    });
}

// Applies `activation` to the first half of each row and multiplies with the second half: [rows, 2 * width] ->
// [rows, width]. Without gates, applies it to each row [rows, width].
void activate(const float* x, float* out, int activation, int gated, int64_t rows, int64_t width, int threads) {
    if (activation == SILU) activate(x, out, silu, gated, rows, width, threads);
    else if (activation == GELU) activate(x, out, gelu, gated, rows, width, threads);
    else if (activation == GELU_TANH) activate(x, out, gelu_tanh, gated, rows, width, threads);
    else activate(x, out, relu, gated, rows, width, threads);
}
}
