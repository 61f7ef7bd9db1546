// Paged attention that reads the blocks where they are.
//
// The keys of a block lie dimension by dimension, so that a register holds one dimension of as many keys as it has
// lanes; values lie key by key. The queries of a row that read one KV head make a tile. For each piece of the context,
// whose bounds do not depend on the batch, a tile has scores, their softmax and the weighted values; pieces are joined
// in order (Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax"). Where there are few tiles,
// threads share the pieces, and join them afterwards in the same order: a row's result does not depend on the rows
// beside it, on how it was cut into chunks, nor on the number of threads.

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.hpp"
#include "parallel.hpp"
#include "vector.hpp"

namespace {

constexpr int64_t TILE = 48;    // queries that share what they load, about
constexpr int64_t PIECE = 256;  // keys, about: whole blocks
constexpr int64_t SMALL = 1 << 17;  // multiplications that are done before a helper has begun
constexpr int FEW = ROWS / 2;    // queries for which memory is the limit
constexpr int64_t AHEAD = 3;     // blocks of values that are asked for before they are read
constexpr int64_t CACHE_LINE = 64;

struct Tile {
    const int64_t* blocks;
    int64_t token, position, count;  // its first token, in the batch and in the sequence
    int64_t first_piece, pieces;
};

// The softmax of some queries over some keys, not divided by the sum yet.
struct Partial {
    float *most, *total;  // by query: largest score, sum of exponentials
    float* values;        // by query, `padded` numbers

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

template <typename T>
class Attention {
public:
    Attention(const Batch& batch, const Shape& shape, const Inputs& in, T* keys, T* values)
        : batch(batch), shape(shape), in(in), keys(keys), values(values),
          group(shape.heads / shape.kv_heads), padded((shape.dim + LANES - 1) / LANES * LANES),
          lines((shape.block_size + LANES - 1) / LANES),
          piece_blocks(std::max<int64_t>(1, PIECE / shape.block_size)), columns(piece_blocks * lines * LANES) {
        int64_t most = std::max<int64_t>(1, TILE / group), token = 0;
        for (int64_t row = 0; row < batch.rows; row++)
            for (int64_t done = 0; done < batch.widths[row]; done += most) {
                int64_t position = batch.starts[row] + done, count = std::min(most, batch.widths[row] - done);
                int64_t piece = piece_blocks * shape.block_size, first = first_seen(position) / piece;
                tiles.push_back({batch.tables + batch.slots[row] * batch.columns, token, position, count, first,
                                 (position + count - 1) / piece + 1 - first});
                token += count;
                widest = std::max(widest, count * group);
                work += tiles.back().pieces * count;
            }
    }

    void run() {
        int64_t heads = shape.kv_heads, units = tiles.size() * heads;
        bool shared = units < 4 * shape.threads;  // too few to keep all threads busy
        std::vector<int64_t> offsets(1, 0);       // of each tile's pieces among all pieces
        for (const Tile& tile : tiles) offsets.push_back(offsets.back() + (shared ? tile.pieces : 0));
        Room store = room(offsets.back() * heads * partial_size());
        int threads = work * PIECE * shape.heads * shape.dim > SMALL ? shape.threads : 1;
        parallel(units, std::max<int64_t>(1, units / (4 * threads)), threads, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) write(tiles[i / heads], i % heads);
        });
        parallel(offsets.back() * heads, 1, threads, [&](int64_t begin, int64_t end) {
            Space own(*this);
            for (int64_t i = begin; i < end; i++) {
                int64_t t = std::upper_bound(offsets.begin(), offsets.end(), i / heads) - offsets.begin() - 1;
                read_queries(tiles[t], i % heads, own.query);
                attend(tiles[t], i % heads, i / heads - offsets[t], own.query, own.scores,
                       partial(&store[i * partial_size()]));
            }
        });
        parallel(units, 1, threads, [&](int64_t begin, int64_t end) {
            Space own(*this);
            for (int64_t i = begin; i < end; i++) {
                const Tile& tile = tiles[i / heads];
                Partial next = own.next;
                std::fill_n(own.joined.most, widest, LOWEST);
                std::fill_n(own.joined.total, widest * (padded + 1), 0.0f);
                if (!shared) read_queries(tile, i % heads, own.query);
                for (int64_t p = 0; p < tile.pieces; p++) {
                    if (shared) next = partial(&store[((offsets[i / heads] + p) * heads + i % heads) * partial_size()]);
                    else attend(tile, i % heads, p, own.query, own.scores, next);
                    own.joined.join(next, tile.count * group, padded);
                }
                write_out(tile, i % heads, own.joined);
            }
        });
    }

private:
    // What a thread works with.
    struct Space {
        explicit Space(const Attention& of) {
            static thread_local std::vector<float> room;
            room.resize(std::max<size_t>(room.size(), 2 * of.partial_size() + of.widest * (of.shape.dim + of.columns)));
            joined = of.partial(room.data());
            next = of.partial(room.data() + of.partial_size());
            query = room.data() + 2 * of.partial_size();
            scores = query + of.widest * of.shape.dim;
        }

        Partial joined, next;
        float *query, *scores;
    };

    int64_t partial_size() const { return widest * (padded + 2); }

    Partial partial(float* at) const { return {at, at + widest, at + 2 * widest}; }

    int64_t first_seen(int64_t position) const {
        return shape.window ? std::max<int64_t>(0, position - shape.window + 1) : 0;
    }

    T* key_block(const Tile& tile, int64_t block, int64_t head) const {
        return keys + (tile.blocks[block] * shape.kv_heads + head) * shape.dim * shape.block_size;
    }

    T* value_block(const Tile& tile, int64_t block, int64_t head) const {
        return values + (tile.blocks[block] * shape.kv_heads + head) * padded * shape.block_size;
    }

    // Puts the tile's own keys and values into the pool.
    void write(const Tile& tile, int64_t head) {
        for (int64_t i = 0; i < tile.count; i++) {
            int64_t block = (tile.position + i) / shape.block_size, at = (tile.position + i) % shape.block_size;
            const float* k = in.k + (tile.token + i) * in.k_stride + head * shape.dim;
            const float* v = in.v + (tile.token + i) * in.v_stride + head * shape.dim;
            T *key = key_block(tile, block, head) + at, *value = value_block(tile, block, head) + at * padded;
            for (int64_t j = 0; j < shape.dim; j += LANES) {
                T some[LANES];
                store(some, load_some(k + j, shape.dim - j));
                for (int64_t l = 0; l < std::min<int64_t>(LANES, shape.dim - j); l++) key[(j + l) * shape.block_size] = some[l];
                store(value + j, load_some(v + j, shape.dim - j));
            }
        }
    }

    // The tile's queries, scaled: token by token, within a token head by head.
    void read_queries(const Tile& tile, int64_t head, float* query) const {
        float scale = 1.0f / std::sqrt((float)shape.dim);
        for (int64_t i = 0; i < tile.count; i++) {
            const float* q = in.q + (tile.token + i) * in.q_stride + head * group * shape.dim;
            for (int64_t j = 0; j < group * shape.dim; j++) *query++ = q[j] * scale;
        }
    }

    void write_out(const Tile& tile, int64_t head, const Partial& joined) const {
        for (int64_t i = 0; i < tile.count * group; i++) {
            float* out = in.out + ((tile.token + i / group) * shape.heads + head * group + i % group) * shape.dim;
            for (int64_t j = 0; j < shape.dim; j += LANES)
                store_some(out + j, load(joined.values + i * padded + j) / joined.total[i], shape.dim - j);
        }
    }

    // One piece of the context, the `index`th that the tile sees.
    void attend(const Tile& tile, int64_t head, int64_t index, const float* query, float* scores, Partial out) const {
        int64_t queries = tile.count * group, first = (tile.first_piece + index) * piece_blocks;
        int64_t last = std::min(first + piece_blocks, (tile.position + tile.count - 1) / shape.block_size + 1);
        int64_t used = (last - first) * lines * LANES;
        for (int64_t i = 0; i < queries; i += ROWS)
            score_rows(std::min<int64_t>(ROWS, queries - i), tile, head, first * lines, last * lines, i, query,
                       scores + i * columns);
        for (int64_t i = 0; i < queries; i++) softmax(scores + i * columns, used, out.most[i], out.total[i]);
        for (int64_t i = 0; i < queries; i += FEW)
            for (int64_t j = 0; j < padded;) {
                int64_t count = std::min<int64_t>(FEW, queries - i);
                const float* weights = scores + i * columns;
                float* sums = out.values + i * padded + j;
                if (padded - j >= 4 * LANES) weigh_rows<4>(count, tile, head, first, last, j, weights, sums), j += 4 * LANES;
                else if (padded - j >= 2 * LANES)
                    weigh_rows<2>(count, tile, head, first, last, j, weights, sums), j += 2 * LANES;
                else weigh_rows<1>(count, tile, head, first, last, j, weights, sums), j += LANES;
            }
    }

    // Scores of M queries, from the `first` on, for N registers of keys from `line` on or what is left of them up to
    // `stop`, -infinity for those that a query does not see.
    template <int M, int N>
    void score(const Tile& tile, int64_t head, int64_t begin, int64_t line, int64_t stop, int64_t first,
               const float* query, float* column) const {
        Vec sums[M][N] = {};
        const T *keys[N], *next[N];
        int64_t positions[N], counts[N];
        for (int n = 0; n < N; n++) {
            int64_t at = std::min(line + n, stop - 1), block = at / lines, skipped = at % lines * LANES;
            keys[n] = key_block(tile, block, head) + skipped;
            positions[n] = block * shape.block_size + skipped;
            counts[n] = std::min<int64_t>(LANES, shape.block_size - skipped);
            next[n] = read_behind(tile, head, begin, line + N + n, stop);
        }
        auto multiply = [&](auto load_keys) {
            const float* q = query + first * shape.dim;
            for (int64_t d = 0; d < shape.dim; d++, q++) {
                Vec k[N];
                if (M <= FEW && d * shape.block_size * sizeof(T) % CACHE_LINE == 0)
                    for (int n = 0; n < N; n++) __builtin_prefetch(next[n] + d * shape.block_size);
                for (int n = 0; n < N; n++) k[n] = load_keys(keys[n] + d * shape.block_size, counts[n]);
                UNROLLED for (int m = 0; m < M; m++)
                    UNROLLED for (int n = 0; n < N; n++) sums[m][n] += q[m * shape.dim] * k[n];
            }
        };
        if (shape.block_size % LANES) multiply([](const T* p, int64_t count) { return load_some(p, count); });
        else multiply([](const T* p, int64_t) { return load(p); });
        UNROLLED for (int m = 0; m < M; m++)
            UNROLLED for (int n = 0; n < N; n++)
                if (line + n < stop) store(column + m * columns + n * LANES, sums[m][n]);
        for (int n = 0; n < N && line + n < stop; n++) {
            if (counts[n] == LANES && positions[n] + LANES - 1 <= tile.position && !shape.window) continue;
            for (int m = 0; m < M; m++) {
                float* own = column + m * columns + n * LANES;
                int64_t position = tile.position + (first + m) / group;
                int64_t begin = std::clamp<int64_t>(first_seen(position) - positions[n], 0, counts[n]);
                int64_t end = std::clamp<int64_t>(position + 1 - positions[n], begin, counts[n]);
                std::fill(own, own + begin, -INFINITE);
                std::fill(own + end, own + LANES, -INFINITE);
            }
        }
    }

    // What is read when the registers of keys from `begin` up to `line` have been: the keys up to `stop`, and then the
    // values from the first on. Blocks lie anywhere, so that memory's own prefetchers do not know.
    const T* read_behind(const Tile& tile, int64_t head, int64_t begin, int64_t line, int64_t stop) const {
        if (line < stop) return key_block(tile, line / lines, head) + line % lines * LANES;
        return value_block(tile, std::min(begin + line - stop, stop - 1) / lines, head);
    }

    // Scores of some queries, from the `first` on, for the registers of keys from `begin` to `stop`.
    template <int M = ROWS>
    void score_rows(int64_t rows, const Tile& tile, int64_t head, int64_t begin, int64_t stop, int64_t first,
                    const float* query, float* column) const {
        if (rows < M) {
            if constexpr (M > 1) score_rows<M - 1>(rows, tile, head, begin, stop, first, query, column);
            return;
        }
        constexpr int N = M <= FEW ? 4 : 2;  // several registers, so that one need not wait for the other's sum
        for (int64_t line = begin; line < stop; line += N, column += N * LANES)
            score<M, N>(tile, head, begin, line, stop, first, query, column);
    }

    static void softmax(float* scores, int64_t count, float& most, float& total) {
        Vec peaks = splat(LOWEST), sums = {};
        for (int64_t c = 0; c < count; c += LANES) peaks = larger(peaks, load(scores + c));
        most = largest(peaks);
        for (int64_t c = 0; c < count; c += LANES) {
            Vec weight = exponential(load(scores + c) - most);
            store(scores + c, weight);
            sums += weight;
        }
        total = sum(sums);
    }

    // Values of the keys that the tile sees, summed with the weights of M queries, in N registers from dimension d on.
    template <int M, int N>
    void weigh(const Tile& tile, int64_t head, int64_t first, int64_t last, int64_t d, const float* weights,
               float* out) const {
        Vec sums[M][N] = {};
        int64_t seen = first_seen(tile.position), end = tile.position + tile.count, size = shape.block_size;
        for (int64_t block = first; block < last; block++) {
            const T* value = value_block(tile, block, head) + d;
            const T* next = value_block(tile, std::min(block + AHEAD, last - 1), head) + d;
            const float* weight = weights + (block - first) * lines * LANES;
            for (int64_t l = std::max<int64_t>(0, seen - block * size); l < std::min(size, end - block * size); l++) {
                Vec v[N];
                for (int n = 0; n < N; n++)
                    if (n * LANES * sizeof(T) % CACHE_LINE == 0) __builtin_prefetch(next + l * padded + n * LANES);
                for (int n = 0; n < N; n++) v[n] = load(value + l * padded + n * LANES);
                UNROLLED for (int m = 0; m < M; m++)
                    UNROLLED for (int n = 0; n < N; n++) sums[m][n] += weight[m * columns + l] * v[n];
            }
        }
        UNROLLED for (int m = 0; m < M; m++)
            UNROLLED for (int n = 0; n < N; n++) store(out + m * padded + n * LANES, sums[m][n]);
    }

    template <int N, int M = FEW>
    void weigh_rows(int64_t rows, const Tile& tile, int64_t head, int64_t first, int64_t last, int64_t d,
                    const float* weights, float* out) const {
        if (rows == M) return weigh<M, N>(tile, head, first, last, d, weights, out);
        if constexpr (M > 1) weigh_rows<N, M - 1>(rows, tile, head, first, last, d, weights, out);
    }

    const Batch& batch;
    const Shape& shape;
    const Inputs& in;
    T *keys, *values;
    int64_t group, padded;  // query heads of a KV head; dimensions of a value with its filling
    int64_t lines;          // registers over the keys of a block
    int64_t piece_blocks, columns;
    std::vector<Tile> tiles;
    int64_t widest = 0, work = 0;
};

}  // namespace

extern "C" {

void attend(const Batch* batch, const Shape* shape, const Inputs* in, void* keys, void* values) {
    if (shape->dtype == BF16) Attention(*batch, *shape, *in, (Bf16*)keys, (Bf16*)values).run();
    else if (shape->dtype == F16) Attention(*batch, *shape, *in, (_Float16*)keys, (_Float16*)values).run();
    else Attention(*batch, *shape, *in, (float*)keys, (float*)values).run();
}

int64_t lanes() { return LANES; }
}
