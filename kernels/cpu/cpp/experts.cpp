// A mixture of experts: a router chooses some experts for each token, whose outputs are summed by their weights.
//
// Tokens are grouped by expert, so that an expert's weights are read once for all of them. A token's experts are summed
// in the order of their numbers, so that its result does not depend on the other tokens.

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.hpp"
#include "parallel.hpp"
#include "vector.hpp"

namespace {

// A token of an expert, and the weight of the expert's result.
struct Choice {
    int64_t token;
    float weight;
};

// Turns a token's router logits [count] into probabilities and appends the token to the lists of its experts. Of experts
// with equal logits the first is chosen.
void choose(const Experts& experts, float* logits, int64_t token, std::vector<std::vector<Choice>>& lists) {
    float most = *std::max_element(logits, logits + experts.count), total = 0;
    for (int64_t i = 0; i < experts.count; i++) total += logits[i] = std::exp(logits[i] - most);
    std::vector<int64_t> order(experts.count);
    for (int64_t i = 0; i < experts.count; i++) order[i] = i;
    std::partial_sort(order.begin(), order.begin() + experts.chosen, order.end(), [&](int64_t a, int64_t b) {
        return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
    });
    if (experts.normalized) {
        total = 0;
        for (int64_t i = 0; i < experts.chosen; i++) total += logits[order[i]];
    }
    for (int64_t i = 0; i < experts.chosen; i++) lists[order[i]].push_back({token, logits[order[i]] / total});
}

// Adds each row, times the weight of its choice, to the token's row of `out`.
void scatter(const std::vector<Choice>& choices, const float* rows, float* out, int64_t width, int threads) {
    parallel(choices.size(), 1 + SERIAL_NUMBERS / width, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            float* to = out + choices[i].token * width;
            for (int64_t j = 0; j < width; j += LANES) {
                Vec v = load_some(to + j, width - j) + choices[i].weight * load_some(rows + i * width + j, width - j);
                store_some(to + j, v, width - j);
            }
        }
    });
}

}  // namespace

extern "C" {

// Computes `out` [tokens, width] of `x` [tokens, width].
void mix_experts(const Experts* experts, const float* x, float* out, int64_t tokens, int threads) {
    const Experts& e = *experts;
    int64_t width = e.router.inputs, inner = std::max(e.down->inputs, e.shared_down.inputs);
    Buffer gathered = allocate(tokens * width), raised = allocate(tokens * 2 * inner), active = allocate(tokens * inner);
    Buffer lowered = allocate(tokens * std::max(width, e.count));
    auto multiply = [&](const float* in, const Matrix& matrix, float* to, int64_t rows) {
        linear(in, matrix.parts, matrix.count, to, rows, matrix.outputs, threads);
    };
    auto feed_forward = [&](const float* in, const Matrix& up, const Matrix& down, int64_t rows) {
        multiply(in, up, raised.get(), rows);
        activate(raised.get(), active.get(), e.activation, true, rows, down.inputs, threads);
        multiply(active.get(), down, lowered.get(), rows);
    };

    multiply(x, e.router, lowered.get(), tokens);
    std::vector<std::vector<Choice>> lists(e.count);
    for (int64_t t = 0; t < tokens; t++) choose(e, lowered.get() + t * e.count, t, lists);

    std::fill(out, out + tokens * width, 0.0f);
    for (int64_t i = 0; i < e.count; i++) {
        const auto& choices = lists[i];
        if (choices.empty() || !e.up[i].parts) continue;  // chosen by no token, or on another rank
        for (size_t row = 0; row < choices.size(); row++)
            std::copy_n(x + choices[row].token * width, width, gathered.get() + row * width);
        feed_forward(gathered.get(), e.up[i], e.down[i], choices.size());
        scatter(choices, lowered.get(), out, width, threads);
    }

    if (!e.shared_gate.parts) return;
    std::vector<float> gates(tokens);
    std::vector<Choice> all(tokens);
    multiply(x, e.shared_gate, gates.data(), tokens);
    for (int64_t t = 0; t < tokens; t++) all[t] = {t, 1.0f / (1.0f + std::exp(-gates[t]))};
    feed_forward(x, e.shared_up, e.shared_down, tokens);
    scatter(all, lowered.get(), out, width, threads);
}
}
