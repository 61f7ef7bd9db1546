// How keys and values are stored: the KV pool of one layer.
//
// The keys of a block are stored dimension by dimension, so that a register holds one dimension of as many keys as it
// has lanes; values are stored key by key. Where a product multiplies pairs of numbers, keys are stored by two dimensions
// and values by two keys. In int8 the keys of a block and head are followed by the scales of its keys and then of its
// values, in float32: two scales per token, which are written once.
#pragma once

#include "int8_pairs.hpp"
#include "kernels.hpp"
#include "rounding.hpp"

// An element of the pool, which a product multiplies at once: a number or a pair.
template <typename T>
struct Element {
    using Stored = T;       // type of its numbers
    using Factor = float;   // type of what it is multiplied with
    using Rounded = float;  // type of the factor's numbers
    using Sum = Vec;        // type of sums of products
    static constexpr int64_t NUMBERS = 1;  // numbers of an element
    static constexpr bool SCALED = false;  // whether numbers have scales
};

#if defined(__AVX512BF16__)
template <>
struct Element<Pair> {
    using Stored = Bf16;
    using Factor = Pair;
    using Rounded = Bf16;
    using Sum = Vec;
    static constexpr int64_t NUMBERS = 2;
    static constexpr bool SCALED = false;
};
using Bf16Pool = Pair;
#else
using Bf16Pool = Bf16;
#endif

template <>
struct Element<Int8Pair> {
    using Stored = int8_t;
    using Factor = Int16Pair;
    using Rounded = int16_t;
    using Sum = Int;
    static constexpr int64_t NUMBERS = 2;
    static constexpr bool SCALED = true;
};

template <typename T>
class KvPool {
    using Stored = typename Element<T>::Stored;
    static constexpr int64_t NUMBERS = Element<T>::NUMBERS, STEPS = 127;
    static constexpr bool SCALED = Element<T>::SCALED;

public:
    KvPool(const AttentionShape& shape, T* keys, T* values)
        : dims((shape.dim + NUMBERS - 1) / NUMBERS), key_rows(dims + (SCALED ? 2 * sizeof(float) / sizeof(T) : 0)),
          padded((shape.value_dim + LANES - 1) / LANES * LANES), shape(shape), keys(keys), values(values),
          value_rows((shape.block_size + NUMBERS - 1) / NUMBERS) {}

    const int64_t dims;      // elements per key
    const int64_t key_rows;  // elements per key and its scales
    const int64_t padded;    // elements per row of values, with padding

    T* key_block(int64_t block, int64_t head) const {
        return keys + (block * shape.kv_heads + head) * key_rows * shape.block_size;
    }

    T* value_block(int64_t block, int64_t head) const {
        return values + (block * shape.kv_heads + head) * value_rows * padded;
    }

    // Returns the scales of a block of keys, and of the values that belong to it.
    float* key_scales(const T* key_block) const { return (float*)(key_block + dims * shape.block_size); }
    float* value_scales(const T* key_block) const { return key_scales(key_block) + shape.block_size; }

    // Writes the key and the value of the token `at` of a block.
    void write(T* key_block, T* value_block, int64_t at, const float* k, const float* v) const {
        T* key = key_block + at;
        Stored* value = (Stored*)(value_block + at / NUMBERS * padded) + at % NUMBERS;
        Rounding of_key = {}, of_value = {};
        if constexpr (SCALED) {
            of_key = rounding(k, shape.dim, STEPS), of_value = rounding(v, shape.value_dim, STEPS);
            std::memcpy(key_scales(key_block) + at, &of_key.scale, sizeof(float));  // may be unaligned
            std::memcpy(value_scales(key_block) + at, &of_value.scale, sizeof(float));
        }
        auto put = [](Stored* p, Vec x, const Rounding& integers) {
            if constexpr (SCALED) x *= integers.factor;
            store(p, x);
        };
        for (int64_t j = 0; j < shape.dim; j += LANES) {
            T some[LANES / NUMBERS];
            put((Stored*)some, load_some(k + j, shape.dim - j), of_key);
            int64_t count = std::min<int64_t>(LANES / NUMBERS, dims - j / NUMBERS);
            for (int64_t l = 0; l < count; l++) key[(j / NUMBERS + l) * shape.block_size] = some[l];
        }
        for (int64_t j = 0; j < shape.value_dim; j += LANES) {
            Stored numbers[LANES];
            put(numbers, load_some(v + j, shape.value_dim - j), of_value);
            for (int64_t l = 0; l < LANES; l++) value[(j + l) * NUMBERS] = numbers[l];
        }
    }

private:
    const AttentionShape& shape;
    T *keys, *values;
    int64_t value_rows;  // elements per row of values and rows per block
};
