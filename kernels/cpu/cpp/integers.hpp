// Matrix products with weights as unsigned integers of 4, 5, 6 or 8 bits, Python's `IntegerWeights`.
//
// Instructions multiply integers of 8 bits, which are too few for inputs, and 16 bits would take two products per input.
// So two inputs have three numbers of 8 bits: the inputs are `ONE * first + common` and `ONE * second + RATIO * common`,
// times a scale, which gives them 10 bits or more. `common` multiplies a blend of both codes. Chunks of 32 inputs have a
// scale of their own.
//
// A panel stores its outputs chunk by chunk in quads, 4 inputs of each output side by side, because instructions add up 4
// products at a time. The sum of a chunk's products is an exact integer on every CPU, with any instruction; it is scaled
// and added in float32 in the order of the chunks. So a row's result does not depend on the other rows.
#pragma once

#include "product.hpp"
#include "rounding.hpp"

constexpr int64_t CHUNK = 32;  // inputs
constexpr int QUADS = CHUNK / 4;
constexpr int PAIRS = QUADS / 2;  // pairs of quads, whose inputs have a number in common
constexpr int HALF = 16;          // inputs of the smallest group
constexpr int QUAD = 4 * LANES;   // bytes of a register of quads
constexpr int ONE_BITS = 7, ONE = 1 << ONE_BITS;
// Bytes between the prefetch of codes, of scales and minima, and their use.
constexpr int CODES_PREFETCH = PREFETCH_BYTES / 2, NUMBERS_PREFETCH = PREFETCH_BYTES / 8;

constexpr int INT_ROWS = 32;  // rows of a tile
// Rows that are multiplied at once: with so many sums that no instruction waits for the one before.
#if defined(__AVX512F__)
constexpr int ROWS_AT_ONCE = 8;
#else
constexpr int ROWS_AT_ONCE = 2;
#endif

typedef uint8_t Bytes __attribute__((vector_size(QUAD)));

inline Bytes mean(Bytes a, Bytes b) {
#if defined(__AVX512BW__)
    return (Bytes)_mm512_avg_epu8((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (Bytes)_mm256_avg_epu8((__m256i)a, (__m256i)b);
#else
    return (a | b) - ((a ^ b) >> 1);
#endif
}

// The codes of a chunk in a panel. Codes of 4 to 6 bits are stored as nibbles, two quads in a byte, followed by their
// higher bits, as many quads in a byte as fit. The registers of the panel's halves alternate.
template <int BITS>
struct Codes {
    static constexpr int HIGH = BITS == 8 ? 0 : BITS - 4, TOGETHER = HIGH ? 8 / HIGH : QUADS;
    static constexpr int LOW_REGISTERS = BITS == 8 ? QUADS : QUADS / 2, HIGH_REGISTERS = HIGH ? QUADS / TOGETHER : 0;
    static constexpr int64_t SIZE = 2 * QUAD * (LOW_REGISTERS + HIGH_REGISTERS);

    // A blend of two codes is (first + RATIO * second) / PART, which has 8 bits.
    static constexpr int RATIO = BITS == 4 ? 16 : BITS == 8 ? 7 : 3, PART = BITS == 8 ? 8 : 1;
    // Largest magnitude of a first or second number: AVX2 adds two products with codes of 8 bits in 16 bits.
    static constexpr int MOST = BITS == 8 ? 63 : 127;
    static constexpr int STEPS = (MOST - RATIO / 2) * ONE;  // the integer to which the largest input is rounded

    static Bytes read(const uint8_t* chunk, int index) {
        Bytes bytes;
        std::memcpy(&bytes, chunk + index * QUAD, sizeof bytes);
        return bytes;
    }

    // Returns a quad of each output of one half.
    static Bytes load(const uint8_t* chunk, int quad, int half) {
        if constexpr (BITS == 8) return read(chunk, 2 * quad + half);
        Int low = (Int)read(chunk, 2 * (quad / 2) + half) >> 4 * (quad % 2) & 0x0f0f0f0f;
        if constexpr (HIGH == 0) return (Bytes)low;
        constexpr int32_t MASK = ((1 << HIGH) - 1) * 0x01010101;
        Int high = (Int)read(chunk, 2 * (LOW_REGISTERS + quad / TOGETHER) + half) >> HIGH * (quad % TOGETHER) & MASK;
        return (Bytes)(low | high << 4);
    }

    // Returns the blend of a pair of quads of each output of one half. Codes of 4 bits are stored as their blend.
    static Bytes blend(const uint8_t* chunk, int pair, int half) {
        if constexpr (BITS == 4) return read(chunk, 2 * pair + half);
        Bytes first = load(chunk, 2 * pair, half), second = load(chunk, 2 * pair + 1, half);
        if constexpr (BITS == 8) return mean(second, mean(second, mean(second, first)));
        return first + second + second + second;
    }

    // Returns one code: `lane` is the output's place in the half.
    static int32_t one(const uint8_t* chunk, int input, int half, int lane) {
        int quad = input / 4, at = 4 * lane + input % 4;
        auto byte = [&](int index) { return chunk[(2 * index + half) * QUAD + at]; };
        if constexpr (BITS == 8) return byte(quad);
        int32_t low = byte(quad / 2) >> 4 * (quad % 2) & 15;
        if constexpr (HIGH == 0) return low;
        return low | (byte(LOW_REGISTERS + quad / TOGETHER) >> HIGH * (quad % TOGETHER) & ((1 << HIGH) - 1)) << 4;
    }
};

// The inputs of a chunk that a sum includes: all, or one half.
enum Span { ALL, FIRST, SECOND };

// A chunk of a row, in one line of the cache.
struct alignas(64) Chunk {
    int32_t first[PAIRS], second[PAIRS], common[PAIRS];  // integers of 8 bits, 4 in each number
    float scale;    // number = scale * integer
    float sums[3];  // sum of the numbers of each `Span`
};

// Rows of inputs as integers.
struct RoundedRows {
    int64_t count;  // chunks of a row
    std::unique_ptr<Chunk[]> chunks;  // [rows, count]
};

inline void store(int32_t* quads, Int numbers) {
    Int8 narrow = __builtin_convertvector(numbers, Int8);
    std::memcpy(quads, &narrow, sizeof narrow);
}

// Returns the first and the second quad of each pair of two registers.
template <size_t... I>
inline std::pair<Int, Int> two_quads(Int left, Int right, std::index_sequence<I...>) {
    return {__builtin_shuffle(left, right, Int{(int32_t)(I / 4 * 8 + I % 4)...}),
            __builtin_shuffle(left, right, Int{(int32_t)(I / 4 * 8 + I % 4 + 4)...})};
}

// Rounds `count` numbers, at most a chunk.
template <int BITS>
void round_chunk(const float* x, int64_t count, Chunk& out) {
    using C = Codes<BITS>;
    constexpr int REGISTERS = CHUNK / LANES;
    Vec parts[REGISTERS];
    Int most = {};
    for (int64_t i = 0; i < REGISTERS; i++) {
        parts[i] = load_some(x + i * LANES, std::max<int64_t>(count - i * LANES, 0));
        most = larger_magnitudes(most, parts[i]);
    }
    Rounding integers = rounding(most, C::STEPS);
    for (Vec& part : parts) part = integers.factor ? part * integers.factor : Vec{};  // infinity times 0 is NaN
    int32_t halves[2] = {};
    UNROLLED for (int64_t i = 0; i < REGISTERS / 2; i++) {
        auto [a, b] = two_quads(nearest(parts[2 * i]), nearest(parts[2 * i + 1]), std::make_index_sequence<LANES>());
        // In integers that can be expressed, RATIO * a - b is a multiple of ONE. The nearest multiple shows their error,
        // of which the larger share is a's.
        constexpr int32_t SHARE = (C::RATIO << 16) / (C::RATIO * C::RATIO + 1), UP = ONE / 2;
        Int difference = C::RATIO * a - b, ones = (difference + UP) >> ONE_BITS;
        a -= ((difference - ones * ONE) * SHARE + (1 << 15)) >> 16;
        Int first = (a + UP) >> ONE_BITS, common = a - first * ONE, second = C::RATIO * first - ones;
        store(out.first + i * LANES / 4, first);
        store(out.second + i * LANES / 4, second);
        store(out.common + i * LANES / 4, common);
        Int sums = (first + second) * (ONE / C::PART) + common * ((1 + C::RATIO) / C::PART);
        constexpr int ADJACENT = std::min(LANES, HALF / 2);
        sums = reduce<ADJACENT>(sums, [](Int a, Int b) { return a + b; });
        UNROLLED for (int j = 0; j < LANES; j += ADJACENT) halves[(i * LANES + j) / (HALF / 2)] += sums[j];
    }
    out.scale = integers.scale * C::PART;
    out.sums[ALL] = out.scale * (halves[0] + halves[1]);
    out.sums[FIRST] = out.scale * halves[0];
    out.sums[SECOND] = out.scale * halves[1];
}

template <int BITS>
RoundedRows round_rows(const float* x, int64_t rows, int64_t inputs, int threads) {
    int64_t count = (inputs + CHUNK - 1) / CHUNK;
    RoundedRows out = {count, std::unique_ptr<Chunk[]>(new Chunk[rows * count])};
    parallel(rows, SERIAL_NUMBERS / inputs, threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++)
            for (int64_t i = 0; i < count; i++)
                round_chunk<BITS>(x + row * inputs + i * CHUNK, std::min(CHUNK, inputs - i * CHUNK),
                                  out.chunks[row * count + i]);
    });
    return out;
}

// Whether one instruction adds two products in 16 bits, and a second one widens the sum. Sums of products with codes of
// 4 bits are widened once, after all products of a chunk.
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
constexpr bool TWO_STEPS = true;
#else
constexpr bool TWO_STEPS = false;
#endif

// Widens sums of 16 bits if they are NARROW.
template <bool NARROW>
inline Int widen(Int sums) {
    if constexpr (!NARROW) return sums;
#if defined(__AVX512BW__)
    return (Int)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (Int)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#endif
}

// Adds to each sum the products of 4 codes with 4 numbers, `x`; NARROW sums have 16 bits.
template <bool NARROW>
inline Int add_quads(Int sum, Bytes codes, int32_t x) {
#if defined(__AVX512VNNI__)
    return (Int)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(x));
#elif defined(__AVXVNNI__)
    return (Int)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(x));
#elif defined(__AVX512BW__)
    __m512i twos = _mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(x));
    return NARROW ? (Int)_mm512_add_epi16((__m512i)sum, twos) : sum + widen<true>((Int)twos);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    __m256i twos = _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(x));
    return NARROW ? (Int)_mm256_add_epi16((__m256i)sum, twos) : sum + widen<true>((Int)twos);
#else
    Int w = (Int)codes;
    for (int i = 0; i < 4; i++) sum += (w >> 8 * i & 255) * (int32_t)(int8_t)(x >> 8 * i);
    return sum;
#endif
}

// Reads the scales or minima of a panel, of one group after the other.
struct GroupNumbers {
    const Scales& stored;
    Vec now[2] = {}, steps[2];  // numbers and steps of both halves

    // Reads the numbers of a group, counted from the first panel on, into `now`. A multiple of a step is exact.
    INLINED void take(int64_t group) {
        if (stored.dtype == F32) return read<float>(stored.numbers, group, now);
        if (stored.dtype == F16) return read<Fp16>(stored.numbers, group, now);
        int64_t step = group >> stored.shift;
        if (step << stored.shift == group) read<Fp16>(stored.steps, step, steps);
        read<int8_t>(stored.numbers, group, now);
        for (int half = 0; half < 2; half++) now[half] *= steps[half];
    }

    template <typename T>
    INLINED static void read(const void* numbers, int64_t row, Vec* both) {
        const T* first = (const T*)numbers + row * PANEL;
        for (size_t line = 0; line < PANEL * sizeof(T); line += 64)
            __builtin_prefetch((const char*)first + NUMBERS_PREFETCH + line);
        for (int half = 0; half < 2; half++) both[half] = load(first + half * LANES);
    }
};

// The scales and minima of one panel, group by group.
struct Groups {
    int64_t group;  // index of the next group
    float zero;
    GroupNumbers scales, minima;
    Vec least[2];  // weights whose codes are 0

    Groups(const Weights& weights, int64_t panel)
        : group(panel * ((weights.inputs + weights.group - 1) / weights.group)), zero(weights.zero),
          scales{weights.scales}, minima{weights.minima} {}

    INLINED void next() {
        scales.take(group);
        if (minima.stored.numbers) minima.take(group);
        for (int half = 0; half < 2; half++) least[half] = add_product(minima.now[half], -zero, scales.now[half]);
        group++;
    }
};

// The codes of a chunk in a panel, unpacked: the quads of each pair, and their blend.
template <int BITS>
struct Unpacked {
    Bytes first[PAIRS][2], second[PAIRS][2], blend[PAIRS][2];

    INLINED explicit Unpacked(const uint8_t* chunk) {
        UNROLLED for (int pair = 0; pair < PAIRS; pair++)
            UNROLLED for (int half = 0; half < 2; half++) {
                first[pair][half] = Codes<BITS>::load(chunk, 2 * pair, half);
                second[pair][half] = Codes<BITS>::load(chunk, 2 * pair + 1, half);
                blend[pair][half] = Codes<BITS>::blend(chunk, pair, half);
            }
    }
};

// The sums of a row's outputs in both halves of a panel.
struct Sums {
    Vec halves[2];
};

// Adds a chunk's products to the sums of the rows M, which are `stride` chunks apart.
template <int BITS, Span SPAN, size_t... M>
INLINED inline void add_chunk(const Unpacked<BITS>& weights, const Groups& groups, const Chunk* x,
                              int64_t stride, Sums* sums, std::index_sequence<M...>) {
    using C = Codes<BITS>;
    constexpr int BEGIN = SPAN == SECOND ? PAIRS / 2 : 0, END = SPAN == FIRST ? PAIRS / 2 : PAIRS;
    Int left[] = {(M, Int{})...}, right[] = {(M, Int{})...};
    auto add = [&](const Bytes* codes, auto numbers, int pair, auto narrow) INLINED {
        constexpr bool NARROW = decltype(narrow)::value;
        ((left[M] = add_quads<NARROW>(left[M], codes[0], (x[M * stride].*numbers)[pair]),
          right[M] = add_quads<NARROW>(right[M], codes[1], (x[M * stride].*numbers)[pair])),
         ...);
    };
    constexpr std::bool_constant<TWO_STEPS && BITS == 4> narrow;
    UNROLLED for (int pair = BEGIN; pair < END; pair++) {
        add(weights.first[pair], &Chunk::first, pair, narrow);
        add(weights.second[pair], &Chunk::second, pair, narrow);
    }
    ((left[M] = widen<narrow>(left[M]) * (ONE / C::PART), right[M] = widen<narrow>(right[M]) * (ONE / C::PART)), ...);
    UNROLLED for (int pair = BEGIN; pair < END; pair++)
        add(weights.blend[pair], &Chunk::common, pair, std::false_type());
    auto add_scaled = [&](Sums& row, const Chunk& chunk, Int l, Int r) INLINED {
        Vec dots[] = {__builtin_convertvector(l, Vec), __builtin_convertvector(r, Vec)};
        UNROLLED for (int half = 0; half < 2; half++) {
            row.halves[half] += dots[half] * chunk.scale * groups.scales.now[half];
            row.halves[half] = add_product(row.halves[half], chunk.sums[SPAN], groups.least[half]);
        }
    };
    (add_scaled(sums[M], x[M * stride], left[M], right[M]), ...);
}

// Multiplies `count` rows of a tile: `large` times N rows at once, then N - 1. A chunk's codes are unpacked for all rows.
template <int BITS, bool SPLIT, size_t N>
[[gnu::noinline]] void multiply_integers(const RoundedRows& x, const Tile& tile, int64_t count, int64_t large,
                                         const Weights& weights, const PrefetchPlan& plan, Sums* sums) {
    const uint8_t* codes = (const uint8_t*)weights.panels + tile.panel * plan.bytes;
    const Chunk* rounded = &x.chunks[tile.row * x.count];
    Prefetcher ahead(tile, weights.panels, plan);
    int64_t until = 0;  // the chunk at which the next group begins
    Groups groups(weights, tile.panel);
    std::fill(sums, sums + count, Sums{});

    for (int64_t chunk = 0; chunk < x.count; chunk++, codes += Codes<BITS>::SIZE, rounded++) {
        ahead.step();
        if (chunk == until) {
            groups.next();
            until += (weights.group + CHUNK - 1) / CHUNK;
        }
        Unpacked<BITS> unpacked(codes);
        auto add_rows = [&](auto span) INLINED {
            auto add = [&](int64_t row, auto rows) INLINED {
                add_chunk<BITS, decltype(span)::value>(unpacked, groups, rounded + row * x.count, x.count, sums + row, rows);
            };
            int64_t row = 0;
            for (int64_t i = 0; i < large; i++, row += N) add(row, std::make_index_sequence<N>());
            if constexpr (N > 1)
                for (; row < count; row += N - 1) add(row, std::make_index_sequence<N - 1>());
        };
        if constexpr (SPLIT) {
            add_rows(std::integral_constant<Span, FIRST>());
            if (chunk * CHUNK + HALF < weights.inputs) groups.next();
            add_rows(std::integral_constant<Span, SECOND>());
        } else add_rows(std::integral_constant<Span, ALL>());
    }
}

// Returns the product of `rows` rows at once, at most ROWS_AT_ONCE.
template <int BITS, int N = ROWS_AT_ONCE>
auto integer_product(int64_t rows, bool split) {
    if constexpr (N > 1)
        if (rows < N) return integer_product<BITS, N - 1>(rows, split);
    return split ? multiply_integers<BITS, true, N> : multiply_integers<BITS, false, N>;
}

template <int BITS, typename Target>
void multiply_integers(const float* x, const Weights& weights, Target& target, int64_t rows, int threads) {
    RoundedRows rounded = round_rows<BITS>(x, rows, weights.inputs, threads);
    PrefetchPlan plan(rounded.count * Codes<BITS>::SIZE, rounded.count, (rows + INT_ROWS - 1) / INT_ROWS, CODES_PREFETCH);
    for_tiles(weights, rows, INT_ROWS, CACHED_BYTES / plan.bytes, target, threads, [&](const Tile& tile, int64_t count) {
        int64_t turns = (count + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, most = (count + turns - 1) / turns;
        auto multiply = integer_product<BITS>(most, weights.group == HALF);
        Sums sums[INT_ROWS];
        multiply(rounded, tile, count, count - (most - 1) * turns, weights, plan, sums);
        Tile one = tile;
        for (int64_t m = 0; m < count; m++, one.row++)
            finish(one, &sums[m].halves[0], &sums[m].halves[1], target, std::make_index_sequence<1>());
    });
}
