// Samples one token per row, with the filters of `services.executor.devices.logit_filters`, without sorting the vocabulary.

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "kernels.hpp"
#include "parallel.hpp"
#include "sampling_record.hpp"
#include "vector.hpp"

// The changes of one slot's logits. Null pointers and lengths of 0 change nothing.
struct Edits {
    const uint32_t* allowed;  // a bit per token: token t is bit t % 32 of word t / 32
    const int64_t* bias_ids;
    const float* biases;
    int64_t num_biases;
    const int32_t* seen;  // [vocabulary] twice the occurrences in the output, plus one if the prompt has the token
    const int64_t* bad_words;  // of each text the number of its ids, then the ids
    int64_t num_bad_words;     // length of `bad_words`
    const int64_t* history;    // the tokens before the position, if there are bad words
    int64_t num_prompt_tokens;
};

// Sampling parameters by slot. `stop_ids` [slots, stop_width] is padded with -1.
struct SamplerInput {
    const SamplingRecord* records;
    const int64_t* stop_ids;
    int64_t stop_width;
    const Edits* edits;
};

namespace {

constexpr int64_t RUN = 1024;         // weights per partial sum
constexpr int WAYS = 8, PASSES = 4;  // thresholds tried in a pass over the logits, and passes

// Returns a number in (0, 1). Source: philox4x32-10 of Salmon et al., 2011.
double uniform(uint64_t key, uint32_t position) {
    uint32_t c[4] = {position, 0, 0, 0}, k[2] = {(uint32_t)key, (uint32_t)(key >> 32)};
    for (int round = 0; round < 10; round++, k[0] += 0x9E3779B9, k[1] += 0xBB67AE85) {
        uint64_t a = (uint64_t)c[0] * 0xD2511F53, b = (uint64_t)c[2] * 0xCD9E8D57;
        uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k[0], (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ k[1], (uint32_t)a};
        std::copy_n(next, 4, c);
    }
    return ((c[0] >> 8) + 0.5) * 0x1p-24;
}

// The logits of one row, from which a token is picked.
class Row {
public:
    // Allocates buffers for rows of `count` logits. All rows use the same buffers, one after the other.
    explicit Row(int64_t count)
        : count(count), padded((count + LANES - 1) / LANES * LANES), scaled(allocate(padded)),
          weights(allocate(padded)) {}

    bool holds(int64_t logits) const { return count == logits; }

    // Returns the index of the first largest number of `x`; `NOT_FINITE` if that number is infinite or there is NaN.
    int64_t greedy(const float* x) {
        int64_t at = 0;
        Int odd = {};
        peak = -INFINITE;
        for (int64_t begin = 0; begin < count; begin += RUN) {
            Vec peaks = splat(-INFINITE);
            each(x, begin, [&](int64_t, Vec v) {
                peaks = larger(peaks, v);
                odd |= v != v;
            });
            if (float most = largest(peaks); most > peak) peak = most, at = begin;
        }
        for (int l = 0; l < LANES; l++)
            if (odd[l]) return NOT_FINITE;
        if (std::abs(peak) == INFINITE) return NOT_FINITE;
        return std::find(x + at, x + count - 1, peak) - x;
    }

    // Samples a token. `greedy` must have been called for the same row, and have found a token.
    int64_t draw(const float* x, const SamplingRecord& parameters, double number) {
        float scale = 1.0f / std::max((float)parameters.temperature, std::numeric_limits<float>::min());
        float bound = parameters.min_p > 0 ? std::log(parameters.min_p) : -INFINITE;
        bool few = parameters.top_k > 0 && parameters.top_k < count;
        if (parameters.min_p <= 0 && !few && parameters.top_p >= 1) {  // most weights are used once, so none is stored
            sum_runs([&](int64_t begin) { return weigh(x, scale, begin, [](int64_t, Vec, Vec) {}); });
            return invert(number, [&](int64_t begin) {
                weigh(x, scale, begin, [&](int64_t i, Vec, Vec weight) { store(&weights[i], weight); });
            });
        }
        weigh_all(x, scale);
        if (few) bound = least(bound, parameters.top_k, [](Vec) { return splat(1.0f); });
        if (bound > -INFINITE) cut(bound);
        if (parameters.top_p < 1) cut(least(bound, parameters.top_p * ends.back(), [](Vec weight) { return weight; }));
        return invert(number, [](int64_t) {});
    }

private:
    // Calls `visit` with the registers of the run that starts at `begin`, padded with -infinity after the last logit.
    template <typename Visit>
    void each(const float* x, int64_t begin, Visit visit) const {
        int64_t end = std::min(begin + RUN, count), whole = end - (end - begin) % LANES;
        for (int64_t i = begin; i < whole; i += LANES) visit(i, load(x + i));
        if (whole == end) return;
        Vec rest = splat(-INFINITE);
        std::memcpy(&rest, x + whole, (end - whole) * sizeof(float));
        visit(whole, rest);
    }

    // Calls `add` for each run, which returns the sum of the run's weights, and stores the cumulative sums.
    template <typename Add>
    void sum_runs(Add add) {
        double total = 0;
        ends.clear();
        for (int64_t begin = 0; begin < count; begin += RUN) ends.push_back(total += add(begin));
    }

    // Calls `visit` with the logits of a run, shifted so that the row's largest is 0 and scaled, and with their
    // exponentials. Returns the sum of the exponentials.
    template <typename Visit>
    float weigh(const float* x, float scale, int64_t begin, Visit visit) const {
        Vec sums = {};
        each(x, begin, [&](int64_t i, Vec v) {
            Vec logit = (v - peak) * scale, weight = exponential(logit);
            visit(i, logit, weight);
            sums += weight;
        });
        return sum(sums);
    }

    // Stores the results of `weigh` for all runs.
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

    // Sets the weights of tokens with logits below `bound` to 0.
    void cut(float bound) {
        sum_runs([&](int64_t begin) {
            Vec sums = {};
            for (int64_t i = begin; i < std::min(begin + RUN, padded); i += LANES) {
                Vec weight = load(&scaled[i]) >= bound ? load(&weights[i]) : Vec{};
                store(&weights[i], weight);
                sums += weight;
            }
            return sum(sums);
        });
    }

    // Returns the largest logit, at least `bound`, such that tokens at or above it weigh at least `goal`. Narrows an
    // interval that contains the result, then sorts the few tokens in it.
    template <typename Weight>
    float least(float bound, double goal, Weight weight_of) const {
        float low = std::max(bound, bottom), high = std::numeric_limits<float>::min();
        double above = 0;
        for (int pass = 0; pass < PASSES; pass++) {
            Vec steps[WAYS];
            for (int j = 0; j < WAYS; j++) steps[j] = splat(low + (high - low) * j / WAYS);
            double reached[WAYS + 1] = {};
            for (int64_t begin = 0; begin < padded; begin += RUN) {
                Vec sums[WAYS] = {};
                for (int64_t i = begin; i < std::min(begin + RUN, padded); i += LANES) {
                    Vec logit = load(&scaled[i]), weight = weight_of(load(&weights[i]));
                    for (int j = 0; j < WAYS; j++) sums[j] += logit >= steps[j] ? weight : Vec{};
                }
                for (int j = 0; j < WAYS; j++) reached[j] += sum(sums[j]);
            }
            reached[WAYS] = above;
            int at = WAYS - 1;
            while (at >= 0 && reached[at] < goal) at--;
            above = reached[at + 1];
            high = at + 1 < WAYS ? steps[at + 1][0] : high;
            low = at < 0 ? std::max(bound, LOWEST) : steps[at][0];
            if (at < 0) break;
        }
        Buffer between = allocate(count + 1);
        int64_t inside = 0;
        for (int64_t i = 0; i < count; i++) {  // branch-free, because a branch would be mispredicted
            between[inside] = scaled[i];
            inside += (scaled[i] >= low) & (scaled[i] < high);
        }
        std::sort(&between[0], &between[inside], std::greater<float>());
        for (int64_t i = 0; i < inside; i++)
            if ((above += weight_of(exponential(splat(between[i])))[0]) >= goal) return between[i];
        return inside ? between[inside - 1] : low;
    }

    // Returns the first token at which the cumulative weight exceeds `number` times the total. Calls `prepare` with the
    // begin of a run before reading its weights.
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

    int64_t count, padded;  // number of logits, without and with padding to whole registers
    float peak = -INFINITE, bottom = 0;  // the largest logit; the lowest scaled logit with a positive weight
    Buffer scaled, weights;
    std::vector<double> ends;  // cumulative weight at the end of each run
};

void penalize(float* x, int64_t count, const SamplingRecord& parameters, const int32_t* seen) {
    float factor = parameters.repetition_penalty, each = parameters.frequency_penalty, once = parameters.presence_penalty;
    for (int64_t i = 0; i < count; i++) {
        if (!seen[i]) continue;
        float value = x[i] > 0 ? x[i] / factor : x[i] * factor;
        x[i] = value - each * (seen[i] / 2) - (seen[i] > 1 ? once : 0);
    }
}

// Bans the last id of each bad word where the output before `position` ends with the others.
void ban_words(float* x, const Edits& edits, int64_t position) {
    for (const int64_t *word = edits.bad_words, *end = word + edits.num_bad_words; word < end; word += *word + 1) {
        int64_t others = *word - 1;
        if (others > position - edits.num_prompt_tokens) continue;
        if (std::equal(word + 1, word + 1 + others, edits.history + position - others)) x[word[*word]] = -INFINITE;
    }
}

}  // namespace

extern "C" {

// Edits the logits [rows, vocabulary] of the tokens at `positions` of `slots`, in the order that
// `services.executor.devices.edits` gives.
void edit_logits(float* logits, int64_t vocabulary, const SamplerInput* table, const int64_t* slots,
                 const int64_t* positions, int64_t rows, int threads) {
    parallel(rows, 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            const SamplingRecord& parameters = table->records[slots[r]];
            const Edits& edits = table->edits[slots[r]];
            const int64_t* stop_ids = table->stop_ids + slots[r] * table->stop_width;
            float* x = logits + r * vocabulary;
            for (int64_t i = 0; edits.allowed && i < vocabulary; i++)
                if (!(edits.allowed[i / 32] >> i % 32 & 1)) x[i] = -INFINITE;
            for (int64_t i = 0; i < edits.num_biases; i++) x[edits.bias_ids[i]] += edits.biases[i];
            for (int64_t i = 0; i < table->stop_width && positions[r] < parameters.min_length; i++)
                if (int64_t id = stop_ids[i]; id >= 0) x[id] = -INFINITE;
            if (edits.seen) penalize(x, vocabulary, parameters, edits.seen);
            ban_words(x, edits, positions[r]);
        }
    });
}

// Samples the tokens at `positions` of `slots` from `logits` [rows, vocabulary]. A row whose logits are not finite gets
// `NOT_FINITE`.
void sample(const float* logits, int64_t vocabulary, const SamplerInput* table, const int64_t* slots, const int64_t* positions,
            int64_t rows, int64_t* tokens, int threads) {
    parallel(rows, 1, threads, [&](int64_t begin, int64_t end) {
        static thread_local Row row(0);
        if (!row.holds(vocabulary)) row = Row(vocabulary);
        for (int64_t r = begin; r < end; r++) {
            const SamplingRecord& parameters = table->records[slots[r]];
            const float* x = logits + r * vocabulary;
            tokens[r] = row.greedy(x);
            if (parameters.temperature > 0 && tokens[r] != NOT_FINITE)
                tokens[r] = row.draw(x, parameters, uniform(parameters.key, positions[r]));
        }
    });
}
}
