// The low-rank updates (LoRA) that adapters add to the outputs of matrix products: out += scale * expand(shrink(x)).
//
// Both factors are packed as the weights of any product, so that each row is summed in the same order whatever the other
// rows are. A thread takes all rows of an adapter: with few rows, sharing them out would take longer than the work.

#include "adapters.hpp"

#include "floats.hpp"
#include "product.hpp"

namespace {

// A target that adds each output to those of a row of `out`.
struct AddedOutputs {
    float* out;           // the first updated output of the step's first row
    int64_t stride;       // numbers from one row to the next
    const int64_t* rows;  // the row of each row of the product

    void prepare(int64_t) {}

    bool wants(const Tile&, int64_t, Vec, Vec) const { return true; }

    void take(const Tile& tile, int64_t m, Vec left, Vec right) {
        float* row = place(tile, m);
        store(row, load(row) + left);
        store(row + LANES, load(row + LANES) + right);
    }

    void take_some(const Tile& tile, int64_t m, Vec left, Vec right) {
        Vec both[] = {left, right};
        float *row = place(tile, m), added[PANEL];
        std::memcpy(added, both, sizeof added);
        for (int64_t i = 0; i < tile.columns; i++) row[i] += added[i];
    }

    float* place(const Tile& tile, int64_t m) { return out + rows[tile.row + m] * stride + tile.first; }
};

template <typename Target>
void multiply_into(Target& target, const float* x, const Weights& weights, int64_t rows, int threads) {
    if (weights.kind == BF16) return multiply_bf16(x, weights, target, rows, threads);
    multiply_floats<float>(x, weights.inputs, weights, target, rows, threads);
}

// Updates the rows of one adapter.
void update_rows(const Adapted& adapted, const Updates& updates, const float* x, float* out, int64_t stride, int threads) {
    int64_t inputs = updates.shrink.inputs, ranks = updates.shrink.outputs;
    int64_t count = adapted.count, first = adapted.rows[0];
    Buffer gathered;
    const float* own = x + first * inputs;
    if (adapted.rows[count - 1] - first + 1 != count) {
        gathered = allocate(count * inputs);
        for (int64_t i = 0; i < count; i++)
            std::memcpy(&gathered[i * inputs], x + adapted.rows[i] * inputs, inputs * sizeof(float));
        own = gathered.get();
    }
    Buffer narrow = allocate(count * ranks), scaled = allocate(count * ranks);
    AllOutputs shrunk = {narrow.get(), ranks};
    multiply_into(shrunk, own, updates.shrink, count, threads);
    const float* from = narrow.get();
    for (int64_t i = 0; i < updates.count; i++) {
        const Update& update = updates.parts[i];
        int64_t rank = update.expand.inputs;
        for (int64_t row = 0; row < count; row++)
            for (int64_t k = 0; k < rank; k++) scaled[row * rank + k] = from[row * ranks + k] * (float)update.scale;
        AddedOutputs target = {out + update.first, stride, adapted.rows};
        multiply_into(target, scaled.get(), update.expand, count, threads);
        from += rank;
    }
}

}  // namespace

extern "C" {

void update(const Adapted* adapted, int64_t count, int64_t matrix, const float* x, float* out, int64_t stride,
            int threads) {
    auto one = [&](int64_t i, int threads) {
        const Updates& updates = adapted[i].matrices[matrix];
        if (updates.count) update_rows(adapted[i], updates, x, out, stride, threads);
    };
    if (count == 1) return one(0, threads);
    parallel(count, 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) one(i, 1);
    });
}
}
