// The low-rank updates (LoRA) that adapters add to the outputs of matrix products: out += scale * expand(shrink(x)).
//
// Both factors are packed as the weights of any product, but for the last ranks of the first one (`packed.fold`), and each
// row is summed in the same order whatever the other rows are. Of several adapters, a thread takes all rows of one: with few
// rows, sharing them out would take longer than the work.

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

// The rows of a product as its weights read them: rounded to pairs for weights in bf16 where the CPU multiplies pairs.
#if defined(__AVX512BF16__)
using Narrow = Pair;
using Weight = Pair;
inline int64_t width_of(int64_t inputs, Pair*) { return (inputs + DEPTH - 1) / DEPTH * DEPTH / 2; }
inline void put_row(const float* x, int64_t inputs, Pair* row) { round_row(x, inputs, row, width_of(inputs, row)); }
#else
using Narrow = float;
using Weight = Bf16;
#endif
inline int64_t width_of(int64_t inputs, float*) { return inputs; }
inline void put_row(const float* x, int64_t inputs, float* row) { std::memcpy(row, x, inputs * sizeof *x); }

// Multiplies at most ROWS rows, as `multiply_floats` does, without the frame around it, which takes longer.
template <typename W, typename X, typename Target>
void multiply_few(const X* x, const Weights& weights, Target& target, int64_t rows, int threads) {
    int64_t inputs = width_of(weights.inputs, (X*)nullptr), panels = (weights.outputs + PANEL - 1) / PANEL;
    PrefetchPlans plans(inputs * PANEL * sizeof(W), inputs, 1);
    if (rows * panels * PANEL * weights.inputs < SERIAL_PRODUCTS) threads = 1;
    parallel(panels, 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; p++) {
            int64_t columns = std::min<int64_t>(PANEL, weights.outputs - p * PANEL);
            Tile tile = {nullptr, 0, p * PANEL, columns, 0, 0, 1, p, p + 1};
            multiply_rows(rows, tile, x, (const W*)weights.panels, inputs, plans, target);
        }
    });
}

// Multiplies the rows M with a folded panel, and writes `count` outputs of each to `out`.
template <typename X, typename W, size_t... M>
void multiply_folded(const X* x, const W* panel, int64_t half, float* out, int64_t stride, int64_t count,
                     std::index_sequence<M...>) {
    Vec left[] = {(M, Vec{})...}, right[] = {(M, Vec{})...};
    for (int64_t k = 0; k < half; k++, panel += PANEL) {
        auto [l, r] = load_weights(panel);
        for (size_t line = 0; line < PANEL * sizeof(W); line += 64)
            __builtin_prefetch((const char*)panel + PREFETCH_BYTES + line);
        ((left[M] = add_product(left[M], x[2 * M * half + k], l)), ...);
        ((right[M] = add_product(right[M], x[(2 * M + 1) * half + k], r)), ...);
    }
    (store_some(out + M * stride, left[M] + right[M], count), ...);
}

template <typename W, int M = ROWS, typename X>
void fold_rows(const X* x, const Weights& weights, int64_t rows, float* out, int64_t stride, int64_t count) {
    if constexpr (M > 1)
        if (rows < M) return fold_rows<W, M - 1>(x, weights, rows, out, stride, count);
    int64_t half = width_of(weights.inputs, (X*)nullptr);
    multiply_folded(x, (const W*)weights.panels, half, out, stride, count, std::make_index_sequence<M>());
}

// Updates at most ROWS rows.
template <typename W, typename X>
void update_few(const Updates& updates, const int64_t* rows, int64_t count, int64_t inputs, const float* x, float* out,
                int64_t stride, int threads) {
    int64_t ranks = updates.ranks, width = width_of(inputs, (X*)nullptr);
    thread_local std::vector<X> gathered;
    thread_local std::vector<float> narrow, scaled;
    gathered.resize(std::max<size_t>(gathered.size(), count * std::max(width, width_of(ranks, (X*)nullptr))));
    narrow.resize(std::max<size_t>(narrow.size(), count * ranks));
    scaled.resize(std::max<size_t>(scaled.size(), ranks));
    for (int64_t i = 0; i < count; i++) put_row(x + rows[i] * inputs, inputs, &gathered[i * width]);
    AllOutputs shrunk = {narrow.data(), ranks};
    int64_t whole = updates.shrink.outputs;
    if (whole) multiply_few<W>(gathered.data(), updates.shrink, shrunk, count, threads);
    if (whole < ranks) fold_rows<W>(gathered.data(), updates.folded, count, &narrow[whole], ranks, ranks - whole);
    const float* from = narrow.data();
    for (int64_t i = 0; i < updates.count; i++) {
        const Update& update = updates.parts[i];
        int64_t rank = update.expand.inputs, wide = width_of(rank, (X*)nullptr);
        for (int64_t row = 0; row < count; row++) {
            for (int64_t k = 0; k < rank; k++) scaled[k] = from[row * ranks + k] * (float)update.scale;
            put_row(scaled.data(), rank, &gathered[row * wide]);
        }
        AddedOutputs target = {out + update.first, stride, rows};
        multiply_few<W>(gathered.data(), update.expand, target, count, threads);
        from += rank;
    }
}

template <typename W, typename X>
void update_rows(const Adapted& adapted, const Updates& updates, int64_t inputs, const float* x, float* out,
                 int64_t stride, int threads) {
    int64_t blocks = (adapted.count + ROWS - 1) / ROWS;
    parallel(blocks, 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; block++) {
            int64_t first = adapted.count * block / blocks, count = adapted.count * (block + 1) / blocks - first;
            update_few<W, X>(updates, adapted.rows + first, count, inputs, x, out, stride, blocks > 1 ? 1 : threads);
        }
    });
}

#if defined(__AMX_BF16__)

// Updates rows in tiles, which sum in an order of their own, however few rows there are.
void update_tiles(const Adapted& adapted, const Updates& updates, const float* x, float* out, int64_t stride, int threads) {
    int64_t inputs = updates.shrink.inputs, ranks = updates.ranks, count = adapted.count;
    Buffer gathered = allocate(count * inputs), narrow = allocate(count * ranks), scaled = allocate(count * ranks);
    for (int64_t i = 0; i < count; i++)
        std::memcpy(&gathered[i * inputs], x + adapted.rows[i] * inputs, inputs * sizeof(float));
    AllOutputs shrunk = {narrow.get(), ranks};
    multiply_bf16(gathered.get(), updates.shrink, shrunk, count, threads);
    const float* from = narrow.get();
    for (int64_t i = 0; i < updates.count; i++) {
        const Update& update = updates.parts[i];
        int64_t rank = update.expand.inputs;
        for (int64_t row = 0; row < count; row++)
            for (int64_t k = 0; k < rank; k++) scaled[row * rank + k] = from[row * ranks + k] * (float)update.scale;
        AddedOutputs target = {out + update.first, stride, adapted.rows};
        multiply_bf16(scaled.get(), update.expand, target, count, threads);
        from += rank;
    }
}

#endif

}  // namespace

extern "C" {

void update(const Adapted* adapted, int64_t count, int64_t matrix, const float* x, int64_t inputs, float* out,
            int64_t stride, int threads) {
    auto one = [&](int64_t i, int threads) {
        const Updates& updates = adapted[i].matrices[matrix];
        if (!updates.count) return;
        bool narrow = updates.parts[0].expand.kind == BF16;
#if defined(__AMX_BF16__)
        if (narrow && tiles_allowed()) return update_tiles(adapted[i], updates, x, out, stride, threads);
#endif
        if (narrow) update_rows<Weight, Narrow>(adapted[i], updates, inputs, x, out, stride, threads);
        else update_rows<float, float>(adapted[i], updates, inputs, x, out, stride, threads);
    };
    if (count == 1) return one(0, threads);
    parallel(count, 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) one(i, 1);
    });
}
}
