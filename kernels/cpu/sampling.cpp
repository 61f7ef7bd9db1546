// Picks one token per row, as `services.executor.sampling` describes it, without a sort of the vocabulary.

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "kernels.hpp"
#include "parallel.hpp"
#include "sampling_record.hpp"
#include "vector.hpp"

// How the slots sample. The ids that end a sequence are filled up with -1 to the width of the table.
struct SamplingTable {
    const SamplingRecord* records;
    const int64_t* stop_ids;
    int64_t stop_width;
};

namespace {

constexpr int64_t RUN = 1024;  // weights that are summed before the search looks closer
constexpr int WAYS = 8, PASSES = 4;

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
    // Room for rows of `count` logits; the room serves one row after the other.
    explicit Row(int64_t count)
        : count(count), filled((count + LANES - 1) / LANES * LANES), scaled(room(filled)), weights(room(filled)) {}

    bool holds(int64_t logits) const { return count == logits; }

    // The first of the largest of `x`. A NaN counts as the lowest finite number, infinity as the largest.
    int64_t greedy(float* x) {
        int64_t at = 0;
        Int odd = {};
        peak = -INFINITE;
        for (int64_t begin = 0; begin < count; begin += RUN) {
            Vec peaks = splat(-INFINITE);
            each(x, begin, [&](int64_t, Vec v) {
                peaks = larger(peaks, v);
                odd |= (v != v) | (v == INFINITE);
            });
            if (float most = largest(peaks); most > peak) peak = most, at = begin;
        }
        for (int l = 0; l < LANES; l++)
            if (odd[l]) {
                for (int64_t i = 0; i < count; i++) x[i] = x[i] != x[i] ? LOWEST : std::min(x[i], -LOWEST);
                return greedy(x);
            }
        return std::find(x + at, x + count - 1, peak) - x;
    }

    // After `greedy` of the same row.
    int64_t draw(const float* x, const SamplingRecord& how, double number) {
        float scale = 1.0f / std::max((float)how.temperature, std::numeric_limits<float>::min());
        float bound = how.min_p > 0 ? std::log(how.min_p) : -INFINITE;
        bool few = how.top_k > 0 && how.top_k < count;
        if (how.min_p <= 0 && !few && how.top_p >= 1) {  // most of the weights are not needed again: none is kept
            sum_runs([&](int64_t begin) { return weigh(x, scale, begin, [](int64_t, Vec, Vec) {}); });
            return invert(number, [&](int64_t begin) {
                weigh(x, scale, begin, [&](int64_t i, Vec, Vec weight) { store(&weights[i], weight); });
            });
        }
        weigh_all(x, scale);
        if (few) bound = least(bound, how.top_k, [](Vec) { return splat(1.0f); });
        if (bound > -INFINITE) cut(bound);
        if (how.top_p < 1) cut(least(bound, how.top_p * ends.back(), [](Vec weight) { return weight; }));
        return invert(number, [](int64_t) {});
    }

private:
    // Calls `visit` with the registers of the run that starts at `begin`, -infinity behind the last logit.
    template <typename Visit>
    void each(const float* x, int64_t begin, Visit visit) const {
        int64_t end = std::min(begin + RUN, count), whole = end - (end - begin) % LANES;
        for (int64_t i = begin; i < whole; i += LANES) visit(i, load(x + i));
        if (whole == end) return;
        Vec rest = splat(-INFINITE);
        std::memcpy(&rest, x + whole, (end - whole) * sizeof(float));
        visit(whole, rest);
    }

    // Calls `add` for each run; it returns the sum of a run's weights.
    template <typename Add>
    void sum_runs(Add add) {
        double total = 0;
        ends.clear();
        for (int64_t begin = 0; begin < count; begin += RUN) ends.push_back(total += add(begin));
    }

    // Scales the logits of a run so that the largest of all is 0, and takes their exponentials: `visit` gets both. Returns
    // the sum of the latter.
    template <typename Visit>
    float weigh(const float* x, float scale, int64_t begin, Visit visit) const {
        float top = std::max(peak, LOWEST);
        Vec sums = {};
        each(x, begin, [&](int64_t i, Vec v) {
            Vec logit = (v - top) * scale, weight = exponential(logit);
            visit(i, logit, weight);
            sums += weight;
        });
        return sum(sums);
    }

    // Keeps what `weigh` computes of every run.
    void weigh_all(const float* x, float scale) {
        Vec bottoms = {};
        sum_runs([&](int64_t begin) {
            return weigh(x, scale, begin, [&](int64_t i, Vec logit, Vec weight) {
                store(&scaled[i], logit);
                store(&weights[i], weight);
                bottoms = (logit < bottoms) & (weight > 0) ? logit : bottoms;
            });
        });
        bottom = -largest(-bottoms);
    }

    // Tokens whose logits lie below `bound` weigh nothing any more.
    void cut(float bound) {
        sum_runs([&](int64_t begin) {
            Vec sums = {};
            for (int64_t i = begin; i < std::min(begin + RUN, filled); i += LANES) {
                Vec weight = load(&scaled[i]) >= bound ? load(&weights[i]) : Vec{};
                store(&weights[i], weight);
                sums += weight;
            }
            return sum(sums);
        });
    }

    // The largest logit at which those from it on upwards weigh as much as is `wanted`, of those above `bound`. Bounds
    // of the answer draw together, then the few tokens between them are sorted.
    template <typename Weight>
    float least(float bound, double wanted, Weight weight_of) const {
        float low = std::max(bound, bottom), high = std::numeric_limits<float>::min();
        double above = 0;
        for (int pass = 0; pass < PASSES; pass++) {
            Vec steps[WAYS];
            for (int j = 0; j < WAYS; j++) steps[j] = splat(low + (high - low) * j / WAYS);
            double reached[WAYS + 1] = {};
            for (int64_t begin = 0; begin < filled; begin += RUN) {
                Vec sums[WAYS] = {};
                for (int64_t i = begin; i < std::min(begin + RUN, filled); i += LANES) {
                    Vec logit = load(&scaled[i]), weight = weight_of(load(&weights[i]));
                    for (int j = 0; j < WAYS; j++) sums[j] += logit >= steps[j] ? weight : Vec{};
                }
                for (int j = 0; j < WAYS; j++) reached[j] += sum(sums[j]);
            }
            reached[WAYS] = above;
            int at = WAYS - 1;
            while (at >= 0 && reached[at] < wanted) at--;
            above = reached[at + 1];
            high = at + 1 < WAYS ? steps[at + 1][0] : high;
            low = at < 0 ? std::max(bound, LOWEST) : steps[at][0];
            if (at < 0) break;
        }
        Room between = room(count + 1);
        int64_t found = 0;
        for (int64_t i = 0; i < count; i++) {  // without a branch, which could not be predicted
            between[found] = scaled[i];
            found += (scaled[i] >= low) & (scaled[i] < high);
        }
        std::sort(&between[0], &between[found], std::greater<float>());
        for (int64_t i = 0; i < found; i++)
            if ((above += weight_of(exponential(splat(between[i])))[0]) >= wanted) return between[i];
        return found ? between[found - 1] : low;
    }

    // The first token at which the cumulative weight exceeds its share `number` of the whole. Before the weights of a run
    // are read, `prepare` is called with its begin.
    template <typename Prepare>
    int64_t invert(double number, Prepare prepare) const {
        double target = number * ends.back();
        int64_t run = std::upper_bound(ends.begin(), ends.end(), target) - ends.begin(), last = count - 1;
        double reached = run ? ends[run - 1] : 0;
        for (int64_t i = run * RUN; i < count; i++) {
            if (i % RUN == 0) prepare(i);
            if (weights[i] > 0) last = i;
            if ((reached += weights[i]) > target) return i;
        }
        return last;
    }

    int64_t count, filled;  // logits; with what fills the last register
    float peak = -INFINITE, bottom = 0;  // the largest logit; the lowest scaled one that weighs anything
    Room scaled, weights;
    std::vector<double> ends;  // cumulative weights at the end of each run
};

}  // namespace

extern "C" {

// The tokens at `positions` of `slots`, by `logits` [rows, vocabulary], which are overwritten.
void sample(float* logits, int64_t vocabulary, const SamplingTable* table, const int64_t* slots, const int64_t* positions,
            int64_t rows, int64_t* tokens, int threads) {
    parallel(rows, 1, threads, [&](int64_t begin, int64_t end) {
        static thread_local Row row(0);
        if (!row.holds(vocabulary)) row = Row(vocabulary);
        for (int64_t r = begin; r < end; r++) {
            const SamplingRecord& how = table->records[slots[r]];
            const int64_t* stop_ids = table->stop_ids + slots[r] * table->stop_width;
            float* x = logits + r * vocabulary;
            for (int64_t i = 0; i < table->stop_width && positions[r] < how.min_length; i++)
                if (int64_t id = stop_ids[i]; id >= 0) x[id] = -INFINITE;
            tokens[r] = row.greedy(x);
            if (how.temperature > 0) tokens[r] = row.draw(x, how, uniform(how.key, positions[r]));
        }
    });
}
}
