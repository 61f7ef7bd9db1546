// Picks one token per row, as `services.executor.sampling` describes it, without a sort of the vocabulary.

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "vector.hpp"

// How the slots sample, as columns by slot.
struct Sampling {
    const double *temperature, *top_p;
    const int64_t* top_k;
    const double* min_p;
    const uint64_t* keys;
    const int64_t *floors, *stop_ids;
    int64_t stop_width;
};

namespace {

constexpr int64_t RUN = 1024;  // weights that are summed before the search looks closer
constexpr int BINS = 2048;
constexpr float BINS_PER_UNIT = 32.0f;  // of logits below the largest

// In (0, 1). Source: philox4x32-10 of Salmon et al., 2011.
double uniform(uint64_t key, uint32_t position) {
    uint32_t c[4] = {position, 0, 0, 0}, k[2] = {(uint32_t)key, (uint32_t)(key >> 32)};
    for (int round = 0; round < 10; round++, k[0] += 0x9E3779B9, k[1] += 0xBB67AE85) {
        uint64_t a = (uint64_t)c[0] * 0xD2511F53, b = (uint64_t)c[2] * 0xCD9E8D57;
        uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k[0], (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ k[1], (uint32_t)a};
        std::copy_n(next, 4, c);
    }
    return ((c[0] >> 8) + 0.5) * 0x1p-24;
}

class Row {
public:
    Row(float* logits, int64_t count) : x(logits), count(count), weights(count) {}

    // The first of the largest. A NaN counts as the lowest finite number, infinity as the largest.
    int64_t greedy() {
        Vec peaks = splat(-INFINITE);
        Int odd = {};
        for (int64_t i = 0; i < count; i += LANES) {
            Vec v = padded(i);
            peaks = larger(peaks, v);
            odd |= (v != v) | (v == INFINITE);
        }
        for (int l = 0; l < LANES; l++)
            if (odd[l]) {
                for (int64_t i = 0; i < count; i++) x[i] = x[i] != x[i] ? LOWEST : std::min(x[i], -LOWEST);
                return greedy();
            }
        peak = largest(peaks);
        return std::find(x, x + count, peak) - x;
    }

    // After `greedy`.
    int64_t draw(double temperature, double min_p, int64_t top_k, double top_p, double number) {
        float heat = std::max((float)temperature, std::numeric_limits<float>::min());
        peak = std::max(peak, LOWEST);
        for (int64_t i = 0; i < count; i += LANES) {
            Vec v = (padded(i) - peak) / heat;
            store_some(x + i, v, count - i);
            store_some(&weights[i], exponential(v), count - i);
        }
        float bound = min_p > 0 ? std::log(min_p) : -INFINITE;
        if (top_k > 0 && top_k < count) bound = std::max(bound, least(bound, [&](double) { return top_k; }, [](float) { return 1.0; }));
        if (top_p < 1)
            bound = std::max(bound, least(bound, [&](double all) { return top_p * all; }, [](float w) { return (double)w; }));
        return invert(bound, number);
    }

private:
    Vec padded(int64_t i) const {
        Vec v = load_some(x + i, count - i);
        for (int64_t l = count - i; l < LANES; l++) v[l] = -INFINITE;
        return v;
    }

    // The largest logit at which those from it on upwards weigh as much as `goal` asks for, of those above `bound`.
    template <typename Goal, typename Weight>
    float least(float bound, Goal goal, Weight weight) {
        auto bin = [](float v) { return (int)std::min<float>(-v * BINS_PER_UNIT, BINS - 1); };
        double bins[BINS] = {};
        for (int64_t i = 0; i < count; i++)
            if (x[i] >= bound && x[i] > -INFINITE) bins[bin(x[i])] += weight(weights[i]);
        double all = 0, reached = 0;
        for (double part : bins) all += part;
        double wanted = goal(all);
        int at = 0;
        while (at < BINS - 1 && reached + bins[at] < wanted) reached += bins[at++];
        std::vector<float> inside;
        for (int64_t i = 0; i < count; i++)
            if (x[i] >= bound && x[i] > -INFINITE && bin(x[i]) == at) inside.push_back(x[i]);
        std::sort(inside.begin(), inside.end(), std::greater<float>());
        for (float v : inside)
            if ((reached += weight(exponential(splat(v))[0])) >= wanted) return v;
        return inside.empty() ? bound : inside.back();
    }

    // The first token at which the cumulative weight exceeds its share `number` of the whole.
    int64_t invert(float bound, double number) {
        std::vector<double> ends;
        double total = 0;
        for (int64_t begin = 0; begin < count; begin += RUN) {
            Vec sums = {};
            for (int64_t i = begin; i < std::min(begin + RUN, count); i += LANES) {
                Vec w = padded(i) >= bound ? load_some(&weights[i], count - i) : Vec{};
                store_some(&weights[i], w, count - i);
                sums += w;
            }
            ends.push_back(total += sum(sums));
        }
        double target = number * total;
        int64_t run = std::upper_bound(ends.begin(), ends.end(), target) - ends.begin(), last = count - 1;
        double reached = run ? ends[run - 1] : 0;
        for (int64_t i = run * RUN; i < count; i++) {
            if (weights[i] > 0) last = i;
            if ((reached += weights[i]) > target) return i;
        }
        return last;
    }

    float* x;
    int64_t count;
    float peak = -INFINITE;
    std::vector<float> weights;
};

}  // namespace

extern "C" {

// The tokens at `positions` of `slots`, by `logits` [rows, vocabulary], which are overwritten.
void sample(float* logits, int64_t vocabulary, const Sampling* how, const int64_t* slots, const int64_t* positions,
            int64_t rows, int64_t* tokens, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (rows * vocabulary > 1 << 16)
    for (int64_t r = 0; r < rows; r++) {
        int64_t slot = slots[r];
        float* x = logits + r * vocabulary;
        if (positions[r] < how->floors[slot])
            for (int64_t i = 0; i < how->stop_width; i++) {
                int64_t id = how->stop_ids[slot * how->stop_width + i];
                if (id >= 0) x[id] = -INFINITE;
            }
        Row row(x, vocabulary);
        tokens[r] = row.greedy();
        if (how->temperature[slot] > 0)
            tokens[r] = row.draw(how->temperature[slot], how->min_p[slot], how->top_k[slot], how->top_p[slot],
                                 uniform(how->keys[slot], positions[r]));
    }
}
}
