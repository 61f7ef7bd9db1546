// A decoder in one call, from ids to hidden states. For small batches, a call from Python takes longer than its work.

#include <algorithm>
#include <chrono>
#include <cmath>

#include "kernels.hpp"
#include "vector.hpp"

// Weights side by side, which multiply the same inputs.
struct Matrix {
    const Weights* parts;
    int64_t count, inputs, outputs;
};

struct Layer {
    const float *input_norm, *post_attention_norm, *q_norm, *k_norm;  // the last two may be null
    Matrix qkv, o, gate_up, down;
    int64_t window;  // see `Shape`
};

struct Decoder {
    const Layer* layers;
    int64_t count, width, heads, kv_heads, dim, block_size;
    const Weights* embedding;   // [vocabulary, width]
    const float *norm, *table;  // norm after the last layer; cosines and sines by position
    double eps;
    int64_t dtype, threads;  // `dtype` applies to the KV
};

struct Pool {
    void *keys, *values;  // KV of one layer
};

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// The hidden states of one call, and buffers for the results of a layer.
class Run {
public:
    Run(const Decoder& model, const Batch& batch, const int64_t* ids, const int64_t* positions, int64_t tokens,
        double* seconds)
        : model(model), batch(batch), positions(positions), tokens(tokens), seconds(seconds) {
        int64_t wide = 0, narrow = 0;
        for (int64_t i = 0; i < model.count; i++) {
            wide = std::max({wide, model.layers[i].qkv.outputs, model.layers[i].gate_up.outputs});
            narrow = std::max({narrow, model.layers[i].o.inputs, model.layers[i].down.inputs});
        }
        projected = allocate(tokens * wide);
        inner = allocate(tokens * narrow);
        normed = allocate(tokens * model.width);
        delta = allocate(tokens * model.width);
        x = allocate(tokens * model.width);
        embed(model.embedding, ids, x.get(), tokens, model.threads);
    }

    void layer(const Layer& layer, const Pool& pool, bool first) {
        norm(first ? nullptr : delta.get(), layer.input_norm, normed.get());
        linear(normed.get(), layer.qkv, projected.get());
        attention(layer, pool);
        linear(inner.get(), layer.o, delta.get());
        norm(delta.get(), layer.post_attention_norm, normed.get());
        linear(normed.get(), layer.gate_up, projected.get());
        silu_mul(projected.get(), inner.get(), tokens, layer.down.inputs, model.threads);
        linear(inner.get(), layer.down, delta.get());
    }

    void finish(float* out) { norm(delta.get(), model.norm, out); }

private:
    // Adds `delta`, unless it is null, to the hidden states and normalises the sum.
    void norm(const float* delta, const float* weight, float* out) {
        rms_norm(x.get(), model.width, delta, weight, model.eps, out, model.width, tokens, 1, model.width, model.threads);
    }

    void linear(const float* in, const Matrix& matrix, float* out) {
        double began = now();
        ::linear(in, matrix.parts, matrix.count, out, tokens, matrix.outputs, model.threads);
        seconds[0] += now() - began;
    }

    void attention(const Layer& layer, const Pool& pool) {
        int64_t heads = model.heads, kv_heads = model.kv_heads, dim = model.dim, stride = (heads + 2 * kv_heads) * dim;
        float *q = projected.get(), *k = q + heads * dim, *v = k + kv_heads * dim;
        if (layer.q_norm) {
            rms_norm(q, stride, nullptr, layer.q_norm, model.eps, q, stride, tokens, heads, dim, model.threads);
            rms_norm(k, stride, nullptr, layer.k_norm, model.eps, k, stride, tokens, kv_heads, dim, model.threads);
        }
        double scale = 1.0 / std::sqrt((double)dim);
        rotate(q, stride, model.table, positions, tokens, heads + kv_heads, dim, model.threads);
        Shape shape = {heads, kv_heads, dim, dim, model.block_size, layer.window, 0, model.dtype, model.threads, scale, 0};
        Inputs inputs = {q, k, v, stride, stride, stride, nullptr, inner.get()};
        double began = now();
        attend(&batch, &shape, &inputs, pool.keys, pool.values);
        seconds[1] += now() - began;
    }

    const Decoder& model;
    const Batch& batch;
    const int64_t* positions;
    int64_t tokens;
    double* seconds;
    Buffer x, projected, inner, normed, delta;
};

}  // namespace

extern "C" {

// Computes hidden states `out` [tokens, width] of `ids` at `positions`. Adds to `seconds` the time in matrix products
// and in attention.
void decode(const Decoder* model, const Pool* pools, const Batch* batch, const int64_t* ids, const int64_t* positions,
            int64_t tokens, float* out, double* seconds) {
    Run run(*model, *batch, ids, positions, tokens, seconds);
    for (int64_t i = 0; i < model->count; i++) run.layer(model->layers[i], pools[i], i == 0);
    run.finish(out);
}
}
