// The adapters of a step, as Python passes them.
#pragma once

#include "kernels.hpp"

// A low-rank update of consecutive outputs of a matrix.
struct Update {
    Weights expand;  // [outputs, rank], as F32 or BF16, without a bias
    int64_t first;   // first of the outputs
    double scale;
};

// All updates of one matrix by an adapter.
struct Updates {
    Weights shrink;  // [ranks of all parts, inputs], as F32 or BF16, without a bias
    Weights folded;  // in place of the last LANES ranks or fewer: both halves of their inputs, in one panel; or missing
    int64_t ranks;   // of all parts
    const Update* parts;
    int64_t count;  // 0: there are none
};

// The rows of a step that one adapter updates.
struct Adapted {
    const Updates* matrices;  // by number of the matrix in the model
    const int64_t* rows;      // ascending
    int64_t count;
};

extern "C" {

// Adds to `out` what each of the adapters adds to the product of a matrix with x [rows, inputs]. Rows of `out` are
// `stride` numbers apart.
void update(const Adapted* adapted, int64_t count, int64_t matrix, const float* x, int64_t inputs, float* out,
            int64_t stride, int threads);
}
