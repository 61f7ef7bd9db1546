// Products of numbers in int8 with numbers in int16, two at a time. Their sums are exact integers on every CPU.
#pragma once

#include <algorithm>
#include <limits>

#include "vector.hpp"

// Two numbers, the first in the low half.
struct Int8Pair {
    uint16_t bits;
};
struct Int16Pair {
    int32_t bits;
};

typedef int8_t Int8Pairs __attribute__((vector_size(LANES * 2)));
typedef int16_t Int16Pairs __attribute__((vector_size(LANES * 4)));

// Loads and widens one pair per lane.
inline Int16Pairs load(const Int8Pair* p) {
    Int8Pairs narrow;
    std::memcpy(&narrow, p, sizeof narrow);
#if defined(__AVX512BW__)
    return (Int16Pairs)_mm512_cvtepi8_epi16((__m256i)narrow);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (Int16Pairs)_mm256_cvtepi8_epi16((__m128i)narrow);
#else
    return __builtin_convertvector(narrow, Int16Pairs);
#endif
}

// Adds both products of each pair.
inline Int add_product(Int sum, Int16Pair x, Int16Pairs y) {
#if defined(__AVX512VNNI__)
    return (Int)_mm512_dpwssd_epi32((__m512i)sum, _mm512_set1_epi32(x.bits), (__m512i)y);
#elif defined(__AVXVNNI__)
    return (Int)_mm256_dpwssd_avx_epi32((__m256i)sum, _mm256_set1_epi32(x.bits), (__m256i)y);
#elif defined(__AVX512BW__)
    return sum + (Int)_mm512_madd_epi16(_mm512_set1_epi32(x.bits), (__m512i)y);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return sum + (Int)_mm256_madd_epi16(_mm256_set1_epi32(x.bits), (__m256i)y);
#else
    return sum + (int16_t)x.bits * ((Int)y << 16 >> 16) + (x.bits >> 16) * ((Int)y >> 16);
#endif
}

// Returns the largest integer to which factors may be rounded so that a sum of `count` products fits 32 bits.
inline int32_t steps(int64_t count) {
    constexpr int64_t MOST = std::numeric_limits<int16_t>::max(), ROOM = std::numeric_limits<int32_t>::max();
    return std::min(MOST, ROOM / (128 * count));
}
