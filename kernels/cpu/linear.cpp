// Matrix products with weights packed once, and accumulated in float32.
//
// The outputs are cut into panels of two registers. A panel holds, input by input, the weights of its outputs, so that
// the innermost loop loads two registers and multiplies them with one number of each row. Every output is summed in the
// order of the inputs, however many rows there are: a row's result does not depend on its neighbours.

#include <algorithm>
#include <vector>

#include "vector.hpp"

namespace {

constexpr int PANEL = 2 * LANES;

template <int M, typename W>
void multiply(const float* x, int64_t inputs, const W* panel, const float* bias, float* out, int64_t outputs,
              int64_t columns) {
    Vec sums[M][2] = {};
    for (int64_t k = 0; k < inputs; k++, panel += PANEL) {
        Vec left = load(panel), right = load(panel + LANES);
        for (int m = 0; m < M; m++) {
            sums[m][0] += x[m * inputs + k] * left;
            sums[m][1] += x[m * inputs + k] * right;
        }
    }
    for (int m = 0; m < M; m++)
        for (int64_t i = 0, first = 0; first < columns; i++, first += LANES) {
            int64_t count = std::min<int64_t>(LANES, columns - first);
            Vec sum = bias ? sums[m][i] + load_some(bias + first, count) : sums[m][i];
            if (count == LANES) store(out + m * outputs + first, sum);
            else store_some(out + m * outputs + first, sum, count);
        }
}

template <typename W, int M = ROWS>
void multiply_rows(int64_t rows, const float* x, int64_t inputs, const W* panel, const float* bias, float* out,
                   int64_t outputs, int64_t columns) {
    if (rows == M) return multiply<M>(x, inputs, panel, bias, out, outputs, columns);
    if constexpr (M > 1) multiply_rows<W, M - 1>(rows, x, inputs, panel, bias, out, outputs, columns);
}

template <typename W>
void linear(const float* x, const W* packed, const float* bias, float* out, int64_t rows, int64_t inputs,
            int64_t outputs, int threads) {
    int64_t panels = (outputs + PANEL - 1) / PANEL, parts = (rows + ROWS - 1) / ROWS;
    bool widen = parts > 1 && sizeof(W) < sizeof(float);  // once, not for every tile of rows
#pragma omp parallel num_threads(threads) if (rows * inputs * outputs > 1 << 15)
    {
        std::vector<float> wide(widen ? inputs * PANEL : 0);
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; p++) {
            const W* panel = packed + p * PANEL * inputs;
            for (int64_t i = 0; widen && i < inputs * PANEL; i += LANES) store(&wide[i], load(panel + i));
            int64_t first = p * PANEL, columns = std::min<int64_t>(PANEL, outputs - first);
            const float* shift = bias ? bias + first : nullptr;
            for (int64_t part = 0; part < parts; part++) {
                int64_t begin = rows * part / parts, count = rows * (part + 1) / parts - begin;
                const float* input = x + begin * inputs;
                float* output = out + begin * outputs + first;
                if (widen) multiply_rows(count, input, inputs, wide.data(), shift, output, outputs, columns);
                else multiply_rows(count, input, inputs, panel, shift, output, outputs, columns);
            }
        }
    }
}

}  // namespace

extern "C" {

int64_t panel_width() { return PANEL; }

void linear_f32(const float* x, const float* packed, const float* bias, float* out, int64_t rows, int64_t inputs,
                int64_t outputs, int threads) {
    linear(x, packed, bias, out, rows, inputs, outputs, threads);
}

void linear_bf16(const float* x, const Bf16* packed, const float* bias, float* out, int64_t rows, int64_t inputs,
                 int64_t outputs, int threads) {
    linear(x, packed, bias, out, rows, inputs, outputs, threads);
}

void linear_f16(const float* x, const _Float16* packed, const float* bias, float* out, int64_t rows, int64_t inputs,
                int64_t outputs, int threads) {
    linear(x, packed, bias, out, rows, inputs, outputs, threads);
}
}
