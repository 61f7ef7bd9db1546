// The embedding of tokens: rows of a table.

#include <algorithm>

#include "integers.hpp"
#include "kernels.hpp"
#include "parallel.hpp"
#include "vector.hpp"

namespace {

template <typename T>
void copy_row(const Weights& table, int64_t id, float* out) {
    const T* row = (const T*)table.panels + id * table.inputs;
    for (int64_t j = 0; j < table.inputs; j += LANES)
        store_some(out + j, load_some(row + j, table.inputs - j), table.inputs - j);
}

// Computes the weights of one output, in the layout of integers.hpp.
template <int BITS>
void unpack_row(const Weights& table, int64_t id, float* out) {
    int64_t panel = id / PANEL, output = id % PANEL, half = output / LANES, lane = output % LANES;
    const uint8_t* codes = (const uint8_t*)table.panels + panel * ((table.inputs + CHUNK - 1) / CHUNK) * Codes<BITS>::SIZE;
    Groups groups(table, panel);
    for (int64_t k = 0; k < table.inputs; k++) {
        if (k % table.group == 0) groups.next();
        int32_t code = Codes<BITS>::one(codes + k / CHUNK * Codes<BITS>::SIZE, k % CHUNK, half, lane);
        out[k] = groups.scales.now[half][lane] * (code - table.zero);
        if (table.minima.numbers) out[k] += groups.minima.now[half][lane];
    }
}

using CopyRow = void (*)(const Weights& table, int64_t id, float* out);

CopyRow copier(int64_t kind) {
    switch (kind) {
    case BF16: return copy_row<Bf16>;
    case F16: return copy_row<Fp16>;
    case INT4: return unpack_row<4>;
    case INT5: return unpack_row<5>;
    case INT6: return unpack_row<6>;
    case INT8: return unpack_row<8>;
    default: return copy_row<float>;
    }
}

}  // namespace

extern "C" {

void embed(const Weights* table, const int64_t* ids, float* out, int64_t rows, int threads) {
    CopyRow copy = copier(table->kind);
    parallel(rows, SERIAL_NUMBERS / table->inputs, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            float* row = out + i * table->inputs;
            if (ids[i] >= 0 && ids[i] < table->outputs) copy(*table, ids[i], row);
            else std::fill_n(row, table->inputs, 0.0f);
        }
    });
}
}
