// Rounds floats symmetrically to integers, which a scale turns back into numbers.
#pragma once

#include <algorithm>

#include "vector.hpp"

constexpr float SMALLEST = 1e-30f;  // numbers whose largest is smaller count as zeros

// number = scale * integer, integer = number * factor. The scale is NaN if a number is not finite; the integers are then
// arbitrary.
struct Rounding {
    float scale, factor;
};

// Returns the larger magnitudes as bits: as integers, because NaN is then the largest number.
inline Int larger_magnitudes(Int most, Vec x) {
    Int bits = (Int)x & 0x7fffffff;
    return bits > most ? bits : most;
}

// Returns how numbers are rounded to integers up to `steps`, by the bits of the largest magnitude in each lane.
inline Rounding rounding(Int most, int32_t steps) {
    int32_t bits = reduce<LANES>(most, [](Int a, Int b) { return a > b ? a : b; })[0];
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    bool finite = largest < INFINITE, some = largest >= SMALLEST;
    return {finite ? (some ? largest / steps : 0.0f) : std::numeric_limits<float>::quiet_NaN(),
            finite && some ? steps / largest : 0.0f};
}

inline Rounding rounding(const float* x, int64_t count, int32_t steps) {
    Int most = {};
    for (int64_t i = 0; i < count; i += LANES) most = larger_magnitudes(most, load_some(x + i, count - i));
    return rounding(most, steps);
}
