// A decoder in one call, from ids to hidden states. For small batches, a call from Python takes longer than its work.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

#include "adapters.hpp"
#include "collectives.hpp"
#include "kernels.hpp"
#include "vector.hpp"

// The weights of one layer.
struct Layer {
    Norm attention_in, attention_out, mlp_in, mlp_out, q_norm, k_norm;  // a norm without weights does not take place
    Matrix qkv, o, up, down;
    const Experts* experts;  // in place of `up` and `down`, or null
    const float* table;      // cosines and sines by position; null: heads are not rotated
    int64_t rotated;         // numbers of a head that are rotated
    int64_t window;          // as in `AttentionShape`
    int64_t group;           // index of the batch with its block tables
    int64_t number;          // number of `qkv` in the model, by which adapters know it; those of o, up, down follow
    double scale, soft_cap;
};

// The weights and settings of a model, or of a rank's part of it.
struct Decoder {
    const Layer* layers;
    int64_t count, width, heads, kv_heads, dim, block_size;
    const Weights* embedding;  // [vocabulary, width]
    const Weights* places;     // [positions, width] is added to the embeddings, or null
    Norm norm;                 // follows the last layer
    double eps, embedding_scale;
    int64_t parallel;  // whether attention and feed-forward layer read the same hidden states
    int64_t together;  // whether q_norm and k_norm normalise all heads as one vector
    int64_t gated, activation;
    int64_t dtype, threads;  // `Kind` of the KV pool; maximum threads
    Ranks* ranks;            // null: there is one, and the members after this one are not read
    int64_t first_id;        // id of the first row of `embedding`
    int64_t q_width, k_width;  // numbers of the queries and keys of all ranks, for norms of all heads together
    int64_t holders;         // ranks that have the same KV heads
};

struct Pool {
    void *keys, *values;  // KV pool of one layer
};

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// The hidden states of one call, and buffers for the results of a layer.
class Run {
public:
    Run(const Decoder& model, const Batch* batches, const int64_t* ids, const int64_t* positions, int64_t tokens,
        const Adapted* adapted, int64_t adapters, double* seconds)
        : model(model), batches(batches), positions(positions), tokens(tokens), adapted(adapted), adapters(adapters),
          seconds(seconds) {
        int64_t wide = 0, narrow = 0;
        for (int64_t i = 0; i < model.count; i++) {
            wide = std::max({wide, model.layers[i].qkv.outputs, model.layers[i].up.outputs});
            narrow = std::max({narrow, model.layers[i].o.inputs, model.layers[i].down.inputs});
        }
        projected = allocate(tokens * wide);
        inner = allocate(tokens * narrow);
        normed = allocate(tokens * model.width);
        delta = allocate(tokens * model.width);
        x = allocate(tokens * model.width);
        if (model.ranks) {
            std::vector<int64_t> rows(ids, ids + tokens);
            for (int64_t& row : rows) row -= model.first_id;
            embed(model.embedding, rows.data(), x.get(), tokens, model.threads);
            sum_ranks(x.get(), tokens * model.width);
            if (model.parallel) kept = allocate(tokens * model.width);
        } else {
            embed(model.embedding, ids, x.get(), tokens, model.threads);
        }
        if (model.embedding_scale != 1.0)
            for (int64_t i = 0; i < tokens * model.width; i++) x[i] *= (float)model.embedding_scale;
        if (model.places) {
            embed(model.places, positions, normed.get(), tokens, model.threads);
            add(x.get(), normed.get(), tokens, model.width, model.threads);
        }
    }

    // `delta` is what the previous layer adds to the hidden states x, and then what this one adds.
    void layer(const Layer& layer, const Pool& pool, bool first) {
        linear(enter(first ? nullptr : delta.get(), layer.attention_in), layer.qkv, projected.get(), layer.number);
        attention(layer, pool);
        linear(inner.get(), layer.o, delta.get(), layer.number + 1);
        const float* in;
        if (model.parallel) {
            in = enter(nullptr, layer.mlp_in);
            if (model.ranks) std::swap(delta, kept);  // is summed over the ranks with the result of the feed-forward layer
            else add(x.get(), delta.get(), tokens, model.width, model.threads);
        } else {
            sum_ranks(delta.get(), tokens * model.width);
            leave(layer.attention_out);
            in = enter(delta.get(), layer.mlp_in);
        }
        feed_forward(layer, in);
        if (model.parallel && model.ranks) add(delta.get(), kept.get(), tokens, model.width, model.threads);
        sum_ranks(delta.get(), tokens * model.width);
        leave(layer.mlp_out);
    }

    void finish(float* out) { norm(delta.get(), model.norm, out); }

private:
    // Adds `delta`, unless it is null, to x. Returns x, normalised if there is a norm.
    const float* enter(const float* delta, Norm in) {
        if (in.weight) {
            norm(delta, in, normed.get());
            return normed.get();
        }
        if (delta) add(x.get(), delta, tokens, model.width, model.threads);
        return x.get();
    }

    // Replaces the part of this rank by the sum of all ranks' parts.
    void sum_ranks(float* part, int64_t count) {
        if (model.ranks) all_reduce(model.ranks, part, count, model.threads);
    }

    // Normalises what a layer adds.
    void leave(Norm out) {
        if (!out.weight) return;
        normalize(delta.get(), model.width, nullptr, out, model.eps, delta.get(), model.width, tokens, 1, model.width,
                  model.threads);
    }

    void norm(const float* delta, Norm norm, float* out) {
        normalize(x.get(), model.width, delta, norm, model.eps, out, model.width, tokens, 1, model.width, model.threads);
    }

    void feed_forward(const Layer& layer, const float* in) {
        if (layer.experts) {
            double began = now();
            mix_experts(layer.experts, in, delta.get(), tokens, model.threads);
            seconds[0] += now() - began;
            return;
        }
        linear(in, layer.up, projected.get(), layer.number + 2);
        activate(projected.get(), inner.get(), model.activation, model.gated, tokens, layer.down.inputs, model.threads);
        linear(inner.get(), layer.down, delta.get(), layer.number + 3);
    }

    void linear(const float* in, const Matrix& matrix, float* out, int64_t number) {
        double began = now();
        ::linear(in, matrix.parts, matrix.count, out, tokens, matrix.outputs, model.threads);
        if (adapters) update(adapted, adapters, number, in, matrix.inputs, out, matrix.outputs, model.threads);
        seconds[0] += now() - began;
    }

    void attention(const Layer& layer, const Pool& pool) {
        int64_t heads = model.heads, kv_heads = model.kv_heads, dim = model.dim, stride = (heads + 2 * kv_heads) * dim;
        float *q = projected.get(), *k = q + heads * dim, *v = k + kv_heads * dim;
        if (layer.q_norm.weight && model.together && model.ranks) {
            normalize_together(layer, q, k, stride);
        } else if (layer.q_norm.weight) {
            int64_t parts = model.together ? 1 : heads, kv_parts = model.together ? 1 : kv_heads;
            normalize(q, stride, nullptr, layer.q_norm, model.eps, q, stride, tokens, parts, heads * dim / parts,
                      model.threads);
            normalize(k, stride, nullptr, layer.k_norm, model.eps, k, stride, tokens, kv_parts, kv_heads * dim / kv_parts,
                      model.threads);
        }
        if (layer.table)
            rotate(q, stride, layer.table, positions, tokens, heads + kv_heads, dim, layer.rotated, model.threads);
        AttentionShape shape = {heads,         kv_heads,    dim,          dim,         model.block_size, layer.window, 0,
                       model.dtype, model.threads, layer.scale, layer.soft_cap};
        Inputs inputs = {q, k, v, stride, stride, stride, nullptr, inner.get()};
        double began = now();
        attend(&batches[layer.group], &shape, &inputs, pool.keys, pool.values);
        seconds[1] += now() - began;
    }

    // Normalises the queries and the keys of all ranks' heads by RMSNorm.
    void normalize_together(const Layer& layer, float* q, float* k, int64_t stride) {
        struct { float* x; int64_t width, whole, holders; const float* weight; } sides[] = {
            {q, model.heads * model.dim, model.q_width, 1, layer.q_norm.weight},
            {k, model.kv_heads * model.dim, model.k_width, model.holders, layer.k_norm.weight},
        };
        std::vector<float> squares;
        for (int64_t i = 0; i < tokens; i++)
            for (auto& side : sides) {
                Vec sums = {};
                for (int64_t j = 0; j < side.width; j += LANES) {
                    Vec v = load_some(side.x + i * stride + j, side.width - j);
                    sums += v * v;
                }
                squares.push_back(sum(sums) / side.holders);  // each of them adds the same
            }
        sum_ranks(squares.data(), squares.size());
        const float* total = squares.data();
        for (int64_t i = 0; i < tokens; i++)
            for (auto& side : sides) {
                float scale = 1.0f / std::sqrt(*total++ / side.whole + (float)model.eps), *row = side.x + i * stride;
                for (int64_t j = 0; j < side.width; j += LANES) {
                    int64_t left = side.width - j;
                    store_some(row + j, load_some(row + j, left) * scale * load_some(side.weight + j, left), left);
                }
            }
    }

    const Decoder& model;
    const Batch* batches;
    const int64_t* positions;
    int64_t tokens;
    const Adapted* adapted;
    int64_t adapters;
    double* seconds;
    Buffer x, projected, inner, normed, delta;
    Buffer kept;  // of a parallel block of several ranks, what attention adds
};

}  // namespace

extern "C" {

// Computes hidden states `out` [tokens, width] of `ids` at `positions`. Each group of layers has one of `batches`, which
// differ in their block tables. `adapted` are the rows of each of the `adapters`. Adds to `seconds` the time in matrix
// products, with their updates, and in attention.
void decode(const Decoder* model, const Pool* pools, const Batch* batches, const int64_t* ids, const int64_t* positions,
            int64_t tokens, const Adapted* adapted, int64_t adapters, float* out, double* seconds) {
    Run run(*model, batches, ids, positions, tokens, adapted, adapters, seconds);
    for (int64_t i = 0; i < model->count; i++) run.layer(model->layers[i], pools[i], i == 0);
    run.finish(out);
}
}
