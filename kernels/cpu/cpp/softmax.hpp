// The softmax of one query after the other, over a piece of its context, and over several.
#pragma once

#include <algorithm>

#include "rounding.hpp"

// The unnormalised softmax of some queries over some keys.
struct Partial {
    float *most, *total;  // per query: largest score, sum of exponentials
    float* values;        // per query: `padded` numbers

    void join(const Partial& next, int64_t queries, int64_t padded) {
        for (int64_t i = 0; i < queries; i++) {
            float peak = std::max(most[i], next.most[i]);
            float mine = exponential(splat(most[i] - peak))[0], theirs = exponential(splat(next.most[i] - peak))[0];
            most[i] = peak;
            total[i] = total[i] * mine + next.total[i] * theirs;
            for (int64_t j = 0; j < padded; j += LANES) {
                float* at = values + i * padded + j;
                store(at, load(at) * mine + load(next.values + i * padded + j) * theirs);
            }
        }
    }
};

inline float largest_score(const float* scores, int64_t count) {
    Vec peaks = splat(LOWEST);
    for (int64_t c = 0; c < count; c += LANES) peaks = larger(peaks, load(scores + c));
    return largest(peaks);
}

// Replaces scores by their weights, the exponentials of their distances from the largest one.
template <typename Rounded>
inline void softmax(float* scores, int64_t count, float& most, float& total) {
    most = largest_score(scores, count);
    Vec sums = {};
    for (int64_t c = 0; c < count; c += LANES) {
        Vec weight = exponential(load(scores + c) - most);
        store((Rounded*)scores + c, weight);
        sums += weight;
    }
    total = sum(sums);
}

// Replaces scores by their weights times the scales of their values, rounded to int16, and returns the scale of the
// results. A value whose score is -infinity is hidden: it may have any scale.
inline float scaled_softmax(float* scores, const float* scales, int64_t count, int32_t steps, float& most, float& total) {
    most = largest_score(scores, count);
    Vec sums = {};
    Int magnitudes = {};
    for (int64_t c = 0; c < count; c += LANES) {
        Vec score = load(scores + c), weight = exponential(score - most);
        Vec scaled = score == -INFINITE ? Vec{} : weight * load(scales + c);
        store(scores + c, scaled);
        sums += weight;
        magnitudes = larger_magnitudes(magnitudes, scaled);
    }
    total = sum(sums);
    Rounding integers = rounding(magnitudes, steps);
    for (int64_t c = 0; c < count; c += LANES) store((int16_t*)scores + c, load(scores + c) * integers.factor);
    return integers.scale;
}
