// A mixture of experts: a router chooses some experts for each token, whose outputs are summed by their weights.
//
// Tokens are grouped by expert, so that an expert's weights are read once for all of them. Threads take whole experts
// where these have few tokens: a product of their own would be over before a second thread could help. A token's experts
// are summed in the order of their numbers, so that its result does not depend on the other tokens.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels.hpp"
#include "parallel.hpp"
#include "vector.hpp"

namespace {

constexpr int64_t MOST_NUMBERS = 1 << 22;  // outputs of experts that are kept until they are summed
constexpr int64_t SHARED_ROWS = 32;        // tokens from which on all threads share an expert

// An expert of a token.
struct Choice {
    int64_t expert, row;  // number of the expert, and the row of its output among those of all experts
    float weight;         // of the expert's output
};

// Turns a token's router logits [count] into probabilities, and chooses its experts in the order of their numbers. Of
// experts with equal logits the first is chosen.
void choose(const Experts& experts, float* logits, Choice* choices) {
    float most = *std::max_element(logits, logits + experts.count), total = 0;
    for (int64_t i = 0; i < experts.count; i++) total += logits[i] = std::exp(logits[i] - most);
    std::vector<int64_t> order(experts.count);
    std::iota(order.begin(), order.end(), 0);
    auto end = order.begin() + experts.chosen;
    std::partial_sort(order.begin(), end, order.end(), [&](int64_t a, int64_t b) {
        return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
    });
    if (experts.normalized) {
        total = 0;
        for (int64_t i = 0; i < experts.chosen; i++) total += logits[order[i]];
    }
    std::sort(order.begin(), end);
    for (int64_t i = 0; i < experts.chosen; i++) choices[i] = {order[i], 0, logits[order[i]] / total};
}

// Adds a row, times a weight, to `out`.
void add_weighted(float* out, const float* row, float weight, int64_t width) {
    for (int64_t j = 0; j < width; j += LANES)
        store_some(out + j, load_some(out + j, width - j) + weight * load_some(row + j, width - j), width - j);
}

void multiply(const float* x, const Matrix& matrix, float* out, int64_t rows, int threads) {
    linear(x, matrix.parts, matrix.count, out, rows, matrix.outputs, threads);
}

// The results of a feed-forward layer for some rows.
struct Rows {
    Buffer raised, active, out;

    Rows(int64_t rows, int64_t inner, int64_t width)
        : raised(allocate(rows * 2 * inner)), active(allocate(rows * inner)), out(allocate(rows * width)) {}

    // Computes `count` rows from `first` on, of which `x` has the inputs.
    void compute(const float* x, const Matrix& up, const Matrix& down, int activation, int64_t first, int64_t count,
                 int threads) {
        float *high = raised.get() + first * 2 * down.inputs, *inner = active.get() + first * down.inputs;
        multiply(x, up, high, count, threads);
        activate(high, inner, activation, true, count, down.inputs, threads);
        multiply(inner, down, out.get() + first * down.outputs, count, threads);
    }
};

// Computes all experts that the tokens have chosen, and sets the rows of the choices.
Rows compute_experts(const Experts& e, const float* x, std::vector<Choice>& choices, int64_t width, int threads) {
    int64_t count = choices.size();
    std::vector<int64_t> ends(e.count), firsts(e.count), active;
    for (const Choice& choice : choices) ends[choice.expert]++;
    auto few = [&](int64_t expert) { return ends[expert] - firsts[expert] < SHARED_ROWS; };
    auto more = [&](int64_t a, int64_t b) { return ends[a] - firsts[a] > ends[b] - firsts[b]; };
    std::partial_sum(ends.begin(), ends.end(), ends.begin());
    std::copy(ends.begin(), ends.end() - 1, firsts.begin() + 1);
    Buffer gathered = allocate(count * width);
    std::vector<int64_t> next = firsts;
    for (int64_t i = 0; i < count; i++) {
        choices[i].row = next[choices[i].expert]++;
        std::copy_n(x + i / e.chosen * width, width, gathered.get() + choices[i].row * width);
    }
    for (int64_t i = 0; i < e.count; i++)
        if (ends[i] > firsts[i] && e.up[i].parts) active.push_back(i);  // else on another rank
    std::stable_sort(active.begin(), active.end(), more);  // the largest first, so that threads end together

    int64_t inner = 0;
    for (int64_t i : active) inner = std::max(inner, e.down[i].inputs);
    Rows rows(count, inner, width);
    auto compute = [&](int64_t i, int threads) {
        rows.compute(gathered.get() + firsts[i] * width, e.up[i], e.down[i], e.activation, firsts[i],
                     ends[i] - firsts[i], threads);
    };
    int64_t small = std::count_if(active.begin(), active.end(), few);
    int64_t alone = small < 2 * threads ? active.size() : active.size() - small;
    for (int64_t i = 0; i < alone; i++) compute(active[i], threads);
    parallel(active.size() - alone, 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) compute(active[alone + i], 1);
    });
    return rows;
}

void mix(const Experts& e, const float* x, float* out, int64_t tokens, int threads) {
    int64_t width = e.router.inputs;
    Buffer logits = allocate(tokens * e.count);
    std::vector<Choice> choices(tokens * e.chosen);
    multiply(x, e.router, logits.get(), tokens, threads);
    parallel(tokens, 1 + SERIAL_NUMBERS / 16 / e.count, threads, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) choose(e, logits.get() + t * e.count, &choices[t * e.chosen]);
    });
    Rows rows = compute_experts(e, x, choices, width, threads);

    bool shared = e.shared_gate.parts;
    std::vector<float> gates(shared ? tokens : 0);
    Rows common(gates.size(), e.shared_down.inputs, width);
    if (shared) {
        multiply(x, e.shared_gate, gates.data(), tokens, threads);
        common.compute(x, e.shared_up, e.shared_down, e.activation, 0, tokens, threads);
    }
    parallel(tokens, 1 + SERIAL_NUMBERS / width, threads, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            float* to = out + t * width;
            std::fill_n(to, width, 0.0f);
            for (int64_t i = t * e.chosen; i < (t + 1) * e.chosen; i++)
                if (e.up[choices[i].expert].parts)
                    add_weighted(to, rows.out.get() + choices[i].row * width, choices[i].weight, width);
            if (shared) add_weighted(to, common.out.get() + t * width, 1.0f / (1.0f + std::exp(-gates[t])), width);
        }
    });
}

}  // namespace

extern "C" {

// Computes `out` [tokens, width] of `x` [tokens, width].
void mix_experts(const Experts* experts, const float* x, float* out, int64_t tokens, int threads) {
    int64_t width = experts->router.inputs, most = std::max<int64_t>(1, MOST_NUMBERS / (experts->chosen * width));
    for (int64_t first = 0; first < tokens; first += most)
        mix(*experts, x + first * width, out + first * width, std::min(most, tokens - first), threads);
}
}
