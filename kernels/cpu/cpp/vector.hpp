// A SIMD register of floats, of the machine's width, by the vector extension of GCC and Clang.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__AVX2__)  // AVX-512 implies AVX2
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int ROWS = 12;  // rows of a register tile, two registers wide: 24 of 32 registers
#elif defined(__AVX2__)
constexpr int LANES = 8;
constexpr int ROWS = 6;  // 12 of 16 registers
#else
constexpr int LANES = 4;
constexpr int ROWS = 6;
#endif

// Unrolls loops over registers, so that these do not become an array in memory.
#define UNROLLED _Pragma("GCC unroll 16")
#define INLINED __attribute__((always_inline))

#if defined(__aarch64__)
typedef __fp16 Fp16;  // GCC has _Float16 there only since version 13
#else
typedef _Float16 Fp16;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Int __attribute__((vector_size(LANES * 4)));
typedef int16_t Int16 __attribute__((vector_size(LANES * 2)));
typedef int8_t Int8 __attribute__((vector_size(LANES)));
typedef uint16_t Short __attribute__((vector_size(LANES * 2)));
typedef Fp16 Half __attribute__((vector_size(LANES * 2)));

struct Bf16 {
    uint16_t bits;
};

constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr float LOWEST = std::numeric_limits<float>::lowest();

inline Vec splat(float x) { return x - Vec{}; }

inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// Uses the single instruction for widening, because GCC would widen both halves and join them.
inline Vec load(const Bf16* p) {
    Short s;
    std::memcpy(&s, p, sizeof s);
#if defined(__AVX512F__)
    Int wide = (Int)_mm512_cvtepu16_epi32((__m256i)s);
#elif defined(__AVX2__)
    Int wide = (Int)_mm256_cvtepu16_epi32((__m128i)s);
#else
    Int wide = __builtin_convertvector(s, Int);
#endif
    return (Vec)(wide << 16);
}

inline Vec load(const Fp16* p) {
    Half h;
    std::memcpy(&h, p, sizeof h);
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps((__m256i)h);
#elif defined(__AVX2__) && defined(__F16C__)
    return (Vec)_mm256_cvtph_ps((__m128i)h);
#else
    return __builtin_convertvector(h, Vec);
#endif
}

// Uses the instruction for widening, because GCC would widen one number after the other.
inline Vec load(const int8_t* p) {
    Int8 narrow;
    std::memcpy(&narrow, p, sizeof narrow);
#if defined(__AVX512F__)
    Int wide = (Int)_mm512_cvtepi8_epi32((__m128i)narrow);
#elif defined(__AVX2__)
    Int wide = (Int)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)narrow));
#else
    Int wide = __builtin_convertvector(narrow, Int);
#endif
    return __builtin_convertvector(wide, Vec);
}

#if defined(__AVX512BF16__)

constexpr int64_t PAIRED = 2;  // bf16 numbers per multiplication
#if defined(__AMX_BF16__)
constexpr int64_t DEPTH = 32;  // inputs of a matrix product are padded to a multiple of this, for tiles
#else
constexpr int64_t DEPTH = LANES;
#endif

// Two numbers, the first in the low half.
struct Pair {
    uint32_t bits;
};

inline __m512bh load(const Pair* p) { return (__m512bh)_mm512_loadu_si512(p); }

// Adds both products of each pair, the second one first.
inline Vec add_product(Vec sum, Pair x, __m512bh y) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(x.bits), y);
}

#else

constexpr int64_t PAIRED = 1, DEPTH = 1;

#endif

// Rounds once where the CPU can, in a loop too: GCC would multiply and add in some of the loops that sum one register, and
// a row's result would depend on how many rows are with it.
inline Vec add_product(Vec sum, float x, Vec y) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps(_mm512_set1_ps(x), (__m512)y, (__m512)sum);
#elif defined(__FMA__)
    return (Vec)_mm256_fmadd_ps(_mm256_set1_ps(x), (__m256)y, (__m256)sum);
#else
    return sum + x * y;
#endif
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// Rounds to nearest, ties to even. NaN stays NaN, and subnormal numbers may become 0.
inline void store(Bf16* p, Vec v) {
#if defined(__AVX512BF16__)
    __m256bh narrow = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(p, &narrow, sizeof narrow);
#else
    Int bits = (Int)v;
    Int rounded = ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & 0xffff;
    Int nan = ((bits >> 16) | 0x40) & 0xffff;
    Short s = __builtin_convertvector(v == v ? rounded : nan, Short);
    std::memcpy(p, &s, sizeof s);
#endif
}

inline void store(Fp16* p, Vec v) {
    Half h = __builtin_convertvector(v, Half);
    std::memcpy(p, &h, sizeof h);
}

// Rounds numbers below 2^22 to nearest, ties to even; others become arbitrary integers. The conversion of an x86 CPU keeps
// the compiler from joining the product that x may be and a sum to one instruction, which would not round the product.
inline Int nearest(Vec x) {
#if defined(__AVX512F__)
    return (Int)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (Int)_mm256_cvtps_epi32((__m256)x);
#else
    constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    return (Int)(x + SHIFT) - 0x4b400000;
#endif
}

inline void store(int8_t* p, Vec v) {
    Int8 narrow = __builtin_convertvector(nearest(v), Int8);
    std::memcpy(p, &narrow, sizeof narrow);
}

inline void store(int16_t* p, Vec v) {
    Int16 narrow = __builtin_convertvector(nearest(v), Int16);
    std::memcpy(p, &narrow, sizeof narrow);
}

// Loads the first `count` numbers and pads them with zeros.
template <typename T>
inline auto load_some(const T* p, int64_t count) {
    if (count >= LANES) return load(p);
    T some[LANES] = {};
    std::memcpy(some, p, count * sizeof(T));
    return load(some);
}

template <typename T>
inline void store_some(T* p, Vec v, int64_t count) {
    if (count >= LANES) return store(p, v);
    T all[LANES];
    store(all, v);
    std::memcpy(p, all, count * sizeof(T));
}

template <typename T>
inline float to_float(T x) {
    return (float)x;
}
template <>
inline float to_float(Bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
}

// Returns v, where lanes whose indices differ in one bit have changed places.
template <int BIT, size_t... I>
inline Int exchange(Int v, std::index_sequence<I...>) {
    return __builtin_shuffle(v, Int{(int32_t)(I ^ BIT)...});
}

// Combines each COUNT adjacent lanes, a power of two. All of them hold the result.
template <int COUNT, typename Combine>
inline Int reduce(Int v, const Combine& combine) {
    if constexpr (COUNT == 1) return v;
    else {
        Int other = exchange<COUNT / 2>(v, std::make_index_sequence<LANES>());
        return reduce<COUNT / 2>(combine(v, other), combine);
    }
}

inline float sum(Vec v) {
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) v[i] += v[i + width];
    return v[0];
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

inline float largest(Vec v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}

// Returns whether all numbers of `a` and `b` are less than those of `bar`; false if there is a NaN.
inline bool all_less(Vec a, Vec b, Vec bar) {
#if defined(__AVX512F__)
    auto reach = [&](Vec v) { return _mm512_cmp_ps_mask((__m512)v, (__m512)bar, _CMP_NLT_UQ); };
    return (reach(a) | reach(b)) == 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)((a < bar) & (b < bar))) == 0xff;
#else
    Int less = (a < bar) & (b < bar);
    for (int i = 0; i < LANES; i++)
        if (!less[i]) return false;
    return true;
#endif
}

// Returns exp(x) with an error of at most two units in the last place; 0 below -87, and infinity from 88 or 89 on, near
// the largest float. Source: Cephes' expf.
inline Vec exponential(Vec x) {
    constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
#if defined(__AVX512F__)
    Vec bounded = (Vec)_mm512_min_ps((__m512)splat(89.0f), (__m512)x);  // NaN stays NaN
#else
    Vec bounded = x < -87.0f ? splat(-87.0f) : x > 88.0f ? splat(88.0f) : x;
#endif
    Vec shifted = bounded * 1.44269504f + SHIFT;
    Vec n = shifted - SHIFT;
    Vec r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    Vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
#if defined(__AVX512F__)
    __mmask16 known = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-87.0f), _CMP_NLT_UQ);
    return (Vec)_mm512_maskz_scalef_ps(known, (__m512)p, (__m512)n);
#else
    Vec power = (Vec)(((Int)shifted << 23) + 0x3f800000);
    return x < -87.0f ? Vec{} : x > 88.0f ? splat(INFINITE) : p * power;
#endif
}

// Returns cap * tanh(x / cap). The polynomial is exact where the exponential's result would cancel.
inline Vec soft_capped(Vec x, float cap) {
    Vec y = x / cap, square = y * y;
    Vec p = splat(62.0f / 2835);
    p = p * square - 17.0f / 315;
    p = p * square + 2.0f / 15;
    p = p * square - 1.0f / 3;
    Vec near = y + y * square * p, far = 1.0f - 2.0f / (exponential(y + y) + 1.0f);
    return cap * (square < 0.09f ? near : far);
}
