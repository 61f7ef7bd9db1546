// Reports on sampled tokens: their log-probabilities, ranks, and the likeliest tokens beside them.

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.hpp"
#include "parallel.hpp"

namespace {

constexpr int64_t RUN = 256;  // logits that are searched for large ones together

// Calls `visit` with the registers of x [count], padded with -infinity.
template <typename Visit>
void each(const float* x, int64_t count, Visit visit) {
    int64_t whole = count - count % LANES;
    for (int64_t i = 0; i < whole; i += LANES) visit(load(x + i));
    if (whole == count) return;
    Vec rest = splat(-INFINITE);
    std::memcpy(&rest, x + whole, (count - whole) * sizeof(float));
    visit(rest);
}

// Returns the sum of exp(x - peak). Single precision is enough within a run.
double weight(const float* x, int64_t count, float peak) {
    double total = 0;
    for (int64_t begin = 0; begin < count; begin += RUN) {
        Vec sums = {};
        each(x + begin, std::min(RUN, count - begin), [&](Vec v) { sums += exponential(v - peak); });
        total += sum(sums);
    }
    return total;
}

// Returns how many numbers of x [count] are at least `bound`.
int64_t rank(const float* x, int64_t count, float bound) {
    Int reached = {};
    each(x, count, [&](Vec v) { reached -= v >= bound; });  // true is -1
    int64_t total = 0;
    for (int l = 0; l < LANES; l++) total += reached[l];
    return std::min(total, count);  // the padding is at least a bound of -infinity
}

// Finds the indices of the largest of x [count], `best.size()` of them, in descending order, equal ones in their own order.
void find_largest(const float* x, int64_t count, std::vector<int32_t>& best, int64_t size) {
    auto before = [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
    best.clear();
    if (!size) return;
    float bound = -INFINITE;  // the smallest of the largest so far, which is in front of the heap
    for (int64_t begin = 0; begin < count; begin += RUN) {
        int64_t length = std::min(RUN, count - begin);
        Vec peaks = splat(-INFINITE);
        each(x + begin, length, [&](Vec v) { peaks = larger(peaks, v); });
        bool full = (int64_t)best.size() == size;
        if (full && !(largest(peaks) > bound)) continue;
        for (int64_t i = begin; i < begin + length; i++) {
            if ((int64_t)best.size() == size) {
                if (!(x[i] > bound)) continue;
                std::pop_heap(best.begin(), best.end(), before);
                best.pop_back();
            }
            best.push_back(i);
            std::push_heap(best.begin(), best.end(), before);
            bound = x[best.front()];
        }
    }
    std::sort_heap(best.begin(), best.end(), before);
}

}  // namespace

extern "C" {

// Writes `services.executor.devices.logprobs.reduce_logprobs` of logits [rows, vocabulary], with `entries` per row.
void reduce_logprobs(const float* logits, int64_t vocabulary, const int64_t* tokens, int64_t rows, int64_t entries,
                     int normalized, float lowest, int32_t* out, int threads) {
    parallel(rows, 1, threads, [&](int64_t begin, int64_t end) {
        std::vector<int32_t> best;
        for (int64_t r = begin; r < end; r++) {
            const float* x = logits + r * vocabulary;
            int32_t *ids = out + r * (2 * entries + 1), *values = ids + entries;
            ids[0] = std::max<int64_t>(tokens[r], 0);
            find_largest(x, vocabulary, best, entries - 1);
            std::copy(best.begin(), best.end(), ids + 1);
            double shift = 0;
            if (normalized) {
                float peak = -INFINITE;
                if (best.empty()) {
                    Vec peaks = splat(-INFINITE);
                    each(x, vocabulary, [&](Vec v) { peaks = larger(peaks, v); });
                    peak = largest(peaks);
                } else {
                    peak = x[best[0]];
                }
                shift = peak + std::log(weight(x, vocabulary, peak));
            }
            for (int64_t i = 0; i < entries; i++) {
                float value = std::max<float>(x[ids[i]] - shift, lowest);
                std::memcpy(values + i, &value, sizeof value);
            }
            values[entries] = rank(x, vocabulary, x[ids[0]]);
        }
    });
}
}
