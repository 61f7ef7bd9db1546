// The functions that the files of this folder share and Python calls. Numbers are float32 unless stated otherwise.
#pragma once

#include <memory>

#include "vector.hpp"

// Types of weights. Tables have one of floats, KV pools one of floats or INT8.
enum Kind { F32, BF16, F16, INT4, INT5, INT6, INT8 };

enum Activation { SILU, GELU, GELU_TANH, RELU };  // numbered as in `pagewire.kernels.activation`

constexpr int64_t NOT_FINITE = -2;  // in place of a token of a row whose logits are not finite

using Buffer = std::unique_ptr<float[]>;  // floats that are uninitialised, unlike a vector's

inline Buffer allocate(int64_t count) { return Buffer(new float[count]); }

// Scales or minima of integer weights: floats, or int8 multiples of steps, each of which 2^shift groups share.
struct Scales {
    const void* numbers;  // [panels, groups, PANEL], or null
    const void* steps;    // steps of multiples, float16 [panels, groups >> shift, PANEL]
    int64_t dtype, shift;  // `Kind` of the numbers; binary logarithm of the groups that share a step
};

// The weights of a matrix product in the layout of `CpuKernels.pack` or `CpuKernels.pack_integers`.
struct Weights {
    const void* panels;       // weights, panel by panel
    const float* bias;        // [panels, PANEL] or null
    int64_t inputs, outputs;
    int64_t kind;             // a `Kind`; the other members are for integers: weight = scale * (code - zero) + minimum
    int64_t zero;
    int64_t group;            // inputs that share a scale
    Scales scales, minima;    // minima may be missing
};

// Weights side by side, which multiply the same inputs.
struct Matrix {
    const Weights* parts;
    int64_t count, inputs, outputs;
};

// The rows of one step, and the block tables of a group of layers.
struct Batch {
    const int64_t *slots, *num_computed_tokens, *query_lens;  // one entry per row
    int64_t rows;
    const int64_t* tables;  // block ids by slot
    int64_t columns;        // width of the tables
};

// The sizes and constants of a layer's attention.
struct AttentionShape {
    int64_t heads, kv_heads, dim, value_dim, block_size;  // `dim`: numbers of a query or a key
    int64_t window;  // number of positions that a query sees, its own included; 0: all
    int64_t chunk;   // a query sees only the positions of its own chunk of this length; 0: all
    int64_t dtype;   // `Kind` of the pool
    int64_t threads;
    double scale;     // factor of the product of query and key
    double soft_cap;  // scores become cap * tanh(score / cap); 0: no cap
};

// The tensors of one call of attention.
struct Inputs {
    const float *q, *k, *v;
    int64_t q_stride, k_stride, v_stride;  // numbers from one token to the next
    const float* sinks;                    // per query head, the score of a key without value; null: none
    float* out;                            // [tokens, heads, value_dim], contiguous
};

// The weights of a norm.
struct Norm {
    const float* weight;  // null: there is no norm
    const float* bias;    // null: RMSNorm, else LayerNorm
};

// A mixture of experts. All products are without bias.
struct Experts {
    const Matrix *up, *down;  // [count]; `up` has gates and values
    int64_t count, chosen;    // experts, and experts per token
    int64_t normalized;       // whether the weights of a token's experts are divided by their sum
    int64_t activation;
    Matrix router, shared_up, shared_down, shared_gate;  // `shared_*` is the expert of all tokens, or null
};

extern "C" {

// Writes the rows `ids` of a table [outputs, inputs], zeros for ids outside of it. Floats are contiguous, integers as for
// a matrix product.
void embed(const Weights* table, const int64_t* ids, float* out, int64_t rows, int threads);

// layers.cpp:
void normalize(float* x, int64_t stride, const float* delta, Norm norm, float eps, float* out, int64_t out_stride,
               int64_t rows, int64_t count, int64_t width, int threads);
void add(float* x, const float* delta, int64_t rows, int64_t width, int threads);
void rotate(float* x, int64_t stride, const float* table, const int64_t* positions, int64_t rows, int64_t heads,
            int64_t dim, int64_t rotated, int threads);
void activate(const float* x, float* out, int activation, int gated, int64_t rows, int64_t width, int threads);

// experts.cpp:
void mix_experts(const Experts* experts, const float* x, float* out, int64_t tokens, int threads);

// Multiplies x [rows, inputs] with `parts` side by side. Rows of `out` are `stride` numbers apart.
void linear(const float* x, const Weights* parts, int64_t count, float* out, int64_t rows, int64_t stride, int threads);

// Writes k and v to the pool, then computes attention. `keys` and `values` have the shapes of `CpuKernels.pool_shapes`.
void attend(const Batch* batch, const AttentionShape* shape, const Inputs* in, void* keys, void* values);
}
