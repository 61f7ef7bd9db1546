// Matrix products with weights as unsigned integers of 4, 5, 6 or 8 bits, Python's `IntegerWeights`.
//
// Each row is rounded to int16 in chunks of 32 inputs with a scale of their own. A panel stores its outputs chunk by chunk
// in quads, 4 inputs of each output side by side, which are multiplied as two pairs. The sum of a chunk's products is an
// exact integer on every CPU, with any instruction; it is scaled and added in float32 in the order of the chunks. So a
// row's result does not depend on the other rows.
#pragma once

#include "int8_pairs.hpp"
#include "product.hpp"
#include "rounding.hpp"

constexpr int CHUNK = 32, QUADS = CHUNK / 4;  // inputs and quads of a chunk
constexpr int STEPS = std::numeric_limits<int16_t>::max();  // sums of a chunk's products fit 32 bits
constexpr int HALF = 16;                      // inputs of the smallest group
constexpr int QUAD = 4 * LANES;               // bytes of a register of quads
// Bytes between the prefetch of codes, of scales and minima, and their use.
constexpr int CODES_PREFETCH = PREFETCH_BYTES / 2, NUMBERS_PREFETCH = PREFETCH_BYTES / 8;

#if defined(__AVX512F__)
constexpr int INT_ROWS = 6;  // rows of a tile: 12 sums of floats and 12 of integers in 32 registers
#elif defined(__AVX2__)
constexpr int INT_ROWS = 3;
#else
constexpr int INT_ROWS = 2;
#endif

typedef uint8_t Bytes __attribute__((vector_size(QUAD)));

// Four inputs of a row: the first and the third, then the second and the fourth.
struct Four {
    Int16Pair even, odd;
};

// Scale and sums of a row's chunk in int16.
struct ChunkFactors {
    float scale;      // number = scale * code
    int32_t sums[2];  // sum of the codes of each half
    float sum;        // sum of all codes, times the scale
};

// Rows of inputs in int16.
struct RoundedRows {
    int64_t chunks;
    std::unique_ptr<Four[]> codes;            // [rows, chunks, QUADS]
    std::unique_ptr<ChunkFactors[]> factors;  // [rows, chunks]
};

// Rounds `count` numbers, at most a chunk.
inline void round_chunk(const float* x, int64_t count, Four* codes, ChunkFactors& factors) {
    Vec parts[CHUNK / LANES];
    Int most = {};
    for (int64_t i = 0; i < CHUNK / LANES; i++) {
        parts[i] = load_some(x + i * LANES, std::max<int64_t>(count - i * LANES, 0));
        most = larger_magnitudes(most, parts[i]);
    }
    Rounding integers = rounding(most, STEPS);
    factors = {integers.scale, {}, 0};
    for (int64_t i = 0; i < CHUNK / LANES; i++) {
        Int whole = nearest(integers.factor ? parts[i] * integers.factor : Vec{});  // infinity times 0 is NaN
        for (int j = 0; j < LANES; j += 4)
            codes[(i * LANES + j) / 4] = {pair(whole[j], whole[j + 2]), pair(whole[j + 1], whole[j + 3])};
        for (int j = 0; j < LANES; j++) factors.sums[i * LANES / HALF] += whole[j];
    }
    factors.sum = integers.scale * (factors.sums[0] + factors.sums[1]);
}

inline RoundedRows round_rows(const float* x, int64_t rows, int64_t inputs, int threads) {
    int64_t chunks = (inputs + CHUNK - 1) / CHUNK, total = rows * chunks;
    RoundedRows out = {chunks, std::unique_ptr<Four[]>(new Four[total * QUADS]),
                   std::unique_ptr<ChunkFactors[]>(new ChunkFactors[total])};
    parallel(rows, SERIAL_NUMBERS / inputs, threads, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin * chunks; at < end * chunks; at++) {
            int64_t k = at % chunks * CHUNK;
            round_chunk(x + at / chunks * inputs + k, std::min<int64_t>(CHUNK, inputs - k), &out.codes[at * QUADS],
                        out.factors[at]);
        }
    });
    return out;
}

// The codes of a chunk in a panel. Codes of 4 to 6 bits are stored as nibbles, two quads in a byte, followed by their
// higher bits, as many quads in a byte as fit. The registers of the panel's halves alternate.
template <int BITS>
struct Codes {
    static constexpr int HIGH = BITS == 8 ? 0 : BITS - 4, TOGETHER = HIGH ? 8 / HIGH : QUADS;
    static constexpr int LOW_REGISTERS = BITS == 8 ? QUADS : QUADS / 2, HIGH_REGISTERS = HIGH ? QUADS / TOGETHER : 0;
    static constexpr int64_t SIZE = 2 * QUAD * (LOW_REGISTERS + HIGH_REGISTERS);

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

// Returns the sum of a span's codes.
inline int32_t sum_of(const ChunkFactors& factors, Span span) {
    return span == ALL ? factors.sums[0] + factors.sums[1] : factors.sums[span == SECOND];
}

// Returns the sum of a span's codes, times the scale.
inline float scaled_sum_of(const ChunkFactors& factors, Span span) {
    return span == ALL ? factors.sum : factors.scale * sum_of(factors, span);
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
    GroupNumbers scales, minima;

    Groups(const Weights& weights, int64_t panel)
        : group(panel * ((weights.inputs + weights.group - 1) / weights.group)), scales{weights.scales},
          minima{weights.minima} {}

    INLINED void next() {
        scales.take(group);
        if (minima.stored.numbers) minima.take(group);
        group++;
    }
};

// Multiplies the rows M of a tile; writes the sums of both halves.
template <int BITS, size_t... M>
[[gnu::noinline]] void multiply_integers(const RoundedRows& x, const Tile& tile, const Weights& weights,
                                         const PrefetchPlan& plan, Vec* left_out, Vec* right_out, std::index_sequence<M...>) {
    int64_t chunks = x.chunks;
    const uint8_t* codes = (const uint8_t*)weights.panels + tile.panel * plan.bytes;
    const Four* rounded = &x.codes[tile.row * chunks * QUADS];
    const ChunkFactors* factors = &x.factors[tile.row * chunks];
    Prefetcher ahead(tile, weights.panels, plan);
    bool split = weights.group == HALF, least = weights.minima.numbers;
    int64_t until = 0;  // the chunk at which the next group begins
    int32_t zero = weights.zero;
    Groups groups(weights, tile.panel);
    Vec left[] = {(M, Vec{})...}, right[] = {(M, Vec{})...};

    auto multiply = [&](auto span) INLINED {
        constexpr Span SPAN = decltype(span)::value;
        Int l_dots[] = {(M, Int{})...};
        if (zero) ((l_dots[M] = -zero * sum_of(factors[M * chunks], SPAN) - Int{}), ...);
        Int r_dots[] = {l_dots[M]...};
        UNROLLED for (int quad = SPAN == SECOND ? QUADS / 2 : 0; quad < (SPAN == FIRST ? QUADS / 2 : QUADS); quad++) {
            Int l = (Int)Codes<BITS>::load(codes, quad, 0), r = (Int)Codes<BITS>::load(codes, quad, 1);
            auto add = [&](Int16Pairs l, Int16Pairs r, auto pair) INLINED {
                ((l_dots[M] = add_product(l_dots[M], rounded[M * chunks * QUADS + quad].*pair, l),
                  r_dots[M] = add_product(r_dots[M], rounded[M * chunks * QUADS + quad].*pair, r)),
                 ...);
            };
            add((Int16Pairs)(l & 0x00ff00ff), (Int16Pairs)(r & 0x00ff00ff), &Four::even);
            add(upper_bytes(l), upper_bytes(r), &Four::odd);
        }
        ((left[M] += __builtin_convertvector(l_dots[M], Vec) * factors[M * chunks].scale * groups.scales.now[0],
          right[M] += __builtin_convertvector(r_dots[M], Vec) * factors[M * chunks].scale * groups.scales.now[1]),
         ...);
        if (!least) return;
        float of_x[] = {scaled_sum_of(factors[M * chunks], SPAN)...};
        ((left[M] += groups.minima.now[0] * of_x[M], right[M] += groups.minima.now[1] * of_x[M]), ...);
    };

    for (int64_t chunk = 0; chunk < chunks; chunk++, codes += Codes<BITS>::SIZE, rounded += QUADS, factors++) {
        ahead.step();
        if (chunk == until) {
            groups.next();
            until += (weights.group + CHUNK - 1) / CHUNK;
        }
        if (split) {
            multiply(std::integral_constant<Span, FIRST>());
            if (chunk * CHUNK + HALF < weights.inputs) groups.next();
            multiply(std::integral_constant<Span, SECOND>());
        } else multiply(std::integral_constant<Span, ALL>());
    }
    ((left_out[M] = left[M], right_out[M] = right[M]), ...);
}

template <int BITS, int M = INT_ROWS, typename Target>
void multiply_integer_rows(int64_t count, const Tile& tile, const RoundedRows& x, const Weights& weights,
                           const PrefetchPlan& plan, Target& target) {
    if (count == M) {
        Vec left[M], right[M];
        constexpr auto rows = std::make_index_sequence<M>();
        multiply_integers<BITS>(x, tile, weights, plan, left, right, rows);
        return finish(tile, left, right, target, rows);
    }
    if constexpr (M > 1) multiply_integer_rows<BITS, M - 1>(count, tile, x, weights, plan, target);
}

template <int BITS, typename Target>
void multiply_integers(const RoundedRows& x, const Weights& weights, Target& target, int64_t rows, int threads) {
    PrefetchPlan plan(x.chunks * Codes<BITS>::SIZE, x.chunks, (rows + INT_ROWS - 1) / INT_ROWS, CODES_PREFETCH);
    for_tiles(weights, rows, INT_ROWS, CACHED_BYTES / plan.bytes, target, threads, [&](const Tile& tile, int64_t count) {
        multiply_integer_rows<BITS>(count, tile, x, weights, plan, target);
    });
}
