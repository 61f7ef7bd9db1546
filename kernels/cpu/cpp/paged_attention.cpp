// Paged attention that reads blocks in place; see kv_pool.hpp for their layout.
//
// Where the CPU multiplies pairs of bf16 numbers, queries and softmax weights are rounded to bf16. For a pool in int8 they
// are rounded to int16: a query with a scale of its own, and the weights of a query in a piece, times the scales of
// their values, with one scale.
//
// A tile consists of queries of a row that read the same KV head. The context is cut into pieces, whose bounds do not
// depend on the batch. For each piece, a tile computes scores, their softmax and the weighted values; pieces are joined
// in order (Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax"). If there are few tiles, threads
// share the pieces of a tile and join them afterwards in the same order. So a row's result does not depend on the other
// rows, on the chunks of its prompt, nor on the number of threads.

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "kv_pool.hpp"
#include "parallel.hpp"
#include "softmax.hpp"

namespace {

constexpr int64_t TILE_QUERIES = 48;   // approximate queries of a tile, which share loads
constexpr int64_t PIECE_KEYS = 256;   // approximate keys of a piece, which is whole blocks
constexpr int FEW_QUERIES = ROWS / 2;  // maximum queries for which memory bandwidth is the limit
constexpr int64_t CACHE_LINE = 64;   // bytes

// Number of blocks that the kernel prefetches ahead, because hardware prefetchers cannot predict the next one of scattered
// blocks. They go into the level 2 cache, which can wait for more lines at a time than the level 1 cache.
constexpr int64_t BLOCKS_AHEAD = 4;
constexpr int LEVEL_2 = 2;

// Queries of a row that read the same blocks.
struct Tile {
    const int64_t* blocks;                 // block table of the row
    int64_t token, position, count;  // index of the first query's token in the batch, its position, number of queries
    int64_t first_piece, pieces;           // index of the first piece that a query sees, number of pieces
};

// A piece of a tile's context, for one KV head.
struct Part {
    const Tile* tile;
    int64_t head, piece;
};

template <typename T>
class Attention {
    using Factor = typename Element<T>::Factor;
    using Rounded = typename Element<T>::Rounded;
    using Sum = typename Element<T>::Sum;
    using Vector = decltype(load(std::declval<const T*>()));
    static constexpr int64_t NUMBERS = Element<T>::NUMBERS;
    static constexpr bool SCALED = Element<T>::SCALED;

public:
    Attention(const Batch& batch, const AttentionShape& shape, const Inputs& in, T* keys, T* values)
        : batch(batch), shape(shape), in(in), pool(shape, keys, values), group(shape.heads / shape.kv_heads),
          dims(pool.dims), padded(pool.padded), bounded(shape.window || shape.chunk), lines((shape.block_size + LANES - 1) / LANES),
          piece_blocks(std::max<int64_t>(1, PIECE_KEYS / shape.block_size)), columns(piece_blocks * lines * LANES) {
        int64_t most = std::max<int64_t>(1, TILE_QUERIES / group), token = 0;
        for (int64_t row = 0; row < batch.rows; row++)
            for (int64_t done = 0; done < batch.query_lens[row]; done += most) {
                int64_t position = batch.num_computed_tokens[row] + done;
                int64_t count = std::min(most, batch.query_lens[row] - done);
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
        std::vector<int64_t> offsets(1, 0);  // index of each unit's first part
        for (const Tile& tile : tiles)
            for (int64_t head = 0; head < heads; head++) {
                for (int64_t piece = 0; piece < tile.pieces; piece++) parts.push_back({&tile, head, piece});
                offsets.push_back(parts.size());
            }
        bool shared = units < 4 * shape.threads;  // too few to keep all threads busy
        Buffer store = allocate(shared ? parts.size() * partial_size() : 0);
        int threads = work * PIECE_KEYS * shape.heads * shape.dim > SERIAL_PRODUCTS ? shape.threads : 1;
        parallel(units, std::max<int64_t>(1, units / (4 * threads)), threads, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) write(tiles[i / heads], i % heads);
        });
        parallel(shared ? parts.size() : 0, 1, threads, [&](int64_t begin, int64_t end) {
            Space own(*this);
            for (int64_t p = begin; p < end; p++) attend(p, own, partial(&store[p * partial_size()]));
        });
        parallel(units, 1, threads, [&](int64_t begin, int64_t end) {
            Space own(*this);
            for (int64_t i = begin; i < end; i++) {
                const Tile& tile = tiles[i / heads];
                Partial next = own.next;
                std::fill_n(own.joined.most, widest, LOWEST);
                std::fill_n(own.joined.total, widest * (padded + 1), 0.0f);
                for (int64_t p = offsets[i]; p < offsets[i + 1]; p++) {
                    if (shared) next = partial(&store[p * partial_size()]);
                    else attend(p, own, next);
                    own.joined.join(next, tile.count * group, padded);
                }
                write_out(tile, i % heads, own.joined);
            }
        });
    }

private:
    // The buffers of a thread.
    struct Space {
        explicit Space(const Attention& of) {
            static thread_local std::vector<float> buffer;
            int64_t scales = SCALED ? 2 * of.widest + of.columns : 0;
            buffer.resize(std::max<size_t>(
                buffer.size(), 2 * of.partial_size() + of.widest * (of.dims + of.columns) + scales));
            joined = of.partial(buffer.data());
            next = of.partial(buffer.data() + of.partial_size());
            scores = buffer.data() + 2 * of.partial_size();
            query = (Factor*)(scores + of.widest * of.columns);
            query_scales = (float*)(query + of.widest * of.dims);
            weight_scales = query_scales + of.widest;
            value_scales = weight_scales + of.widest;
            static thread_local std::vector<const T*> blocks;
            blocks.resize(std::max<size_t>(blocks.size(), 2 * of.piece_blocks + BLOCKS_AHEAD));
            reads = blocks.data();
        }

        Partial joined, next;
        float* scores;
        Factor* query;
        float *query_scales, *weight_scales, *value_scales;  // per query, per query, per column of the scores
        const T** reads;  // the blocks to read, in order
    };

    int64_t partial_size() const { return widest * (padded + 2); }

    Partial partial(float* at) const { return {at, at + widest, at + 2 * widest}; }

    int64_t first_seen(int64_t position) const {
        if (shape.chunk) return position / shape.chunk * shape.chunk;
        return shape.window ? std::max<int64_t>(0, position - shape.window + 1) : 0;
    }

    T* key_block(const Tile& tile, int64_t block, int64_t head) const {
        return pool.key_block(tile.blocks[block], head);
    }

    T* value_block(const Tile& tile, int64_t block, int64_t head) const {
        return pool.value_block(tile.blocks[block], head);
    }

    // Writes the keys and values of the tile's tokens to the pool.
    void write(const Tile& tile, int64_t head) {
        for (int64_t i = 0; i < tile.count; i++) {
            int64_t block = (tile.position + i) / shape.block_size, at = (tile.position + i) % shape.block_size;
            const float* k = in.k + (tile.token + i) * in.k_stride + head * shape.dim;
            const float* v = in.v + (tile.token + i) * in.v_stride + head * shape.value_dim;
            pool.write(key_block(tile, block, head), value_block(tile, block, head), at, k, v);
        }
    }

    // Reads the tile's queries and scales them: token by token, and head by head within a token.
    void read_queries(const Tile& tile, int64_t head, const Space& own) const {
        float scale = shape.scale;
        Factor* query = own.query;
        for (int64_t i = 0; i < tile.count * group; i++, query += dims) {
            const float* q = in.q + (tile.token + i / group) * in.q_stride + (head * group + i % group) * shape.dim;
            if constexpr (SCALED) {
                Rounding integers = rounding(q, shape.dim, steps(2 * dims));
                scale = integers.factor;
                own.query_scales[i] = integers.scale * (float)shape.scale;
            }
            query[dims - 1] = {};
            for (int64_t j = 0; j < shape.dim; j += LANES)
                store_some((Rounded*)query + j, load_some(q + j, shape.dim - j) * scale, shape.dim - j);
        }
    }

    void write_out(const Tile& tile, int64_t head, const Partial& joined) const {
        for (int64_t i = 0; i < tile.count * group; i++) {
            int64_t dim = shape.value_dim, query_head = head * group + i % group;
            float* out = in.out + ((tile.token + i / group) * shape.heads + query_head) * dim;
            float total = joined.total[i];
            if (in.sinks) total += std::exp(in.sinks[query_head] - joined.most[i]);
            for (int64_t j = 0; j < dim; j += LANES)
                store_some(out + j, load(joined.values + i * padded + j) / total, dim - j);
        }
    }

    int64_t first_block(const Part& part) const { return (part.tile->first_piece + part.piece) * piece_blocks; }

    int64_t count_blocks(const Part& part) const {
        int64_t last = (part.tile->position + part.tile->count - 1) / shape.block_size + 1;
        return std::min(piece_blocks, last - first_block(part));
    }

    // Lists the first `most` blocks that a part reads: of all keys, then of all values, then the last block repeated.
    void list(const Part& part, int64_t most, const T** reads) const {
        int64_t first = first_block(part), count = count_blocks(part);
        for (int64_t i = 0; i < most; i++)
            reads[i] = i < count ? key_block(*part.tile, first + i, part.head)
                                 : value_block(*part.tile, first + std::min(i - count, count - 1), part.head);
    }

    void attend(int64_t index, const Space& own, Partial out) const {
        const Part &part = parts[index], &next = parts[std::min<int64_t>(index + 1, parts.size() - 1)];
        const Tile& tile = *part.tile;
        int64_t queries = tile.count * group, first = first_block(part), count = count_blocks(part);
        list(part, 2 * count, own.reads);
        list(next, BLOCKS_AHEAD, own.reads + 2 * count);
        read_queries(tile, part.head, own);
        for (int64_t i = 0; i < queries; i += ROWS)
            score_rows(std::min<int64_t>(ROWS, queries - i), tile, first, count * lines, i, own);
        if constexpr (SCALED) read_value_scales(count, own);
        for (int64_t i = 0; i < queries; i++) softmax(i, count * lines * LANES, own, out);
        for (int64_t i = 0; i < queries; i += FEW_QUERIES)
            for (int64_t j = 0; j < padded;) {
                int64_t rows = std::min<int64_t>(FEW_QUERIES, queries - i);
                float* sums = out.values + i * padded + j;
                if (padded - j >= 4 * LANES) weigh_rows<4>(rows, tile, first, count, j, i, own, sums), j += 4 * LANES;
                else if (padded - j >= 2 * LANES)
                    weigh_rows<2>(rows, tile, first, count, j, i, own, sums), j += 2 * LANES;
                else weigh_rows<1>(rows, tile, first, count, j, i, own, sums), j += LANES;
            }
    }

    // Computes scores of M queries from `row` on, for N registers of keys from `line` on, at most up to `stop`. Keys
    // that a query does not see get -infinity. Lines are counted from the block `first`.
    template <int M, int N>
    void score(const Tile& tile, int64_t first, int64_t line, int64_t stop, int64_t row, const Space& own) const {
        Sum sums[M][N] = {};
        const T *keys[N], *next[N];
        const float* scales[N];
        int64_t positions[N], counts[N];
        for (int n = 0; n < N; n++) {
            int64_t at = std::min(line + n, stop - 1), block = at / lines, skipped = at % lines * LANES;
            keys[n] = own.reads[block] + skipped;
            next[n] = own.reads[block + BLOCKS_AHEAD] + skipped;
            scales[n] = pool.key_scales(own.reads[block]) + skipped;
            positions[n] = (first + block) * shape.block_size + skipped;
            counts[n] = std::min<int64_t>(LANES, shape.block_size - skipped);
        }
        auto multiply = [&](auto load_keys) {
            const Factor* q = own.query + row * dims;
            for (int64_t d = 0; d < dims; d++, q++) {
                Vector k[N];
                if (M <= FEW_QUERIES && d * shape.block_size * sizeof(T) % CACHE_LINE == 0)
                    for (int n = 0; n < N; n++) __builtin_prefetch(next[n] + d * shape.block_size, 0, LEVEL_2);
                for (int n = 0; n < N; n++) k[n] = load_keys(keys[n] + d * shape.block_size, counts[n]);
                UNROLLED for (int m = 0; m < M; m++)
                    UNROLLED for (int n = 0; n < N; n++) sums[m][n] = add_product(sums[m][n], q[m * dims], k[n]);
            }
        };
        if (shape.block_size % LANES) multiply([](const T* p, int64_t count) { return load_some(p, count); });
        else multiply([](const T* p, int64_t) { return load(p); });
        Vec scores[M][N];
        if constexpr (SCALED) {
            for (int n = 0; n < N; n++) {
                for (int64_t d = dims; M <= FEW_QUERIES && d < pool.key_rows; d++)
                    if (d * shape.block_size * sizeof(T) % CACHE_LINE == 0)
                        __builtin_prefetch(next[n] + d * shape.block_size, 0, LEVEL_2);
                Vec scale = load_some(scales[n], counts[n]);
                UNROLLED for (int m = 0; m < M; m++)
                    scores[m][n] = __builtin_convertvector(sums[m][n], Vec) * own.query_scales[row + m] * scale;
            }
        } else UNROLLED for (int m = 0; m < M; m++) UNROLLED for (int n = 0; n < N; n++) scores[m][n] = sums[m][n];
        if (shape.soft_cap)
            UNROLLED for (int m = 0; m < M; m++)
                UNROLLED for (int n = 0; n < N; n++) scores[m][n] = soft_capped(scores[m][n], shape.soft_cap);
        float* column = own.scores + row * columns + line * LANES;
        UNROLLED for (int m = 0; m < M; m++)
            UNROLLED for (int n = 0; n < N; n++)
                if (line + n < stop) store(column + m * columns + n * LANES, scores[m][n]);
        for (int n = 0; n < N && line + n < stop; n++) {
            if (counts[n] == LANES && positions[n] + LANES - 1 <= tile.position && !bounded) continue;
            for (int m = 0; m < M; m++) {
                float* line_scores = column + m * columns + n * LANES;
                int64_t position = tile.position + (row + m) / group;
                int64_t begin = std::clamp<int64_t>(first_seen(position) - positions[n], 0, counts[n]);
                int64_t end = std::clamp<int64_t>(position + 1 - positions[n], begin, counts[n]);
                std::fill(line_scores, line_scores + begin, -INFINITE);
                std::fill(line_scores + end, line_scores + LANES, -INFINITE);
            }
        }
    }

    // Computes scores of `rows` queries from `row` on, for all lines.
    template <int M = ROWS>
    void score_rows(int64_t rows, const Tile& tile, int64_t first, int64_t stop, int64_t row, const Space& own) const {
        if (rows < M) {
            if constexpr (M > 1) score_rows<M - 1>(rows, tile, first, stop, row, own);
            return;
        }
        constexpr int N = M <= FEW_QUERIES ? 4 : 2;  // several independent sums hide the latency of an addition
        for (int64_t line = 0; line < stop; line += N) score<M, N>(tile, first, line, stop, row, own);
    }

    // Copies the scales of the values in the part's blocks.
    void read_value_scales(int64_t count, const Space& own) const {
        for (int64_t block = 0; block < count; block++)
            std::memcpy(own.value_scales + block * lines * LANES, pool.value_scales(own.reads[block]),
                        shape.block_size * sizeof(float));
    }

    // Replaces the scores of a query by the factors of its values.
    void softmax(int64_t query, int64_t count, const Space& own, Partial& out) const {
        float *scores = own.scores + query * columns, &most = out.most[query], &total = out.total[query];
        if constexpr (SCALED)
            own.weight_scales[query] = scaled_softmax(scores, own.value_scales, count,
                                                       steps(piece_blocks * shape.block_size), most, total);
        else ::softmax<Rounded>(scores, count, most, total);
    }

    // Sums the values that the tile sees in `count` blocks from `first` on, weighted for M queries from `query` on, in N
    // registers from dimension d on.
    template <int M, int N>
    void weigh(const Tile& tile, int64_t first, int64_t count, int64_t d, int64_t query, const Space& own,
               float* out) const {
        Sum sums[M][N] = {};
        int64_t size = shape.block_size;
        for (int64_t block = 0; block < count; block++) {
            const T *value = own.reads[count + block] + d, *next = own.reads[count + block + BLOCKS_AHEAD] + d;
            const Factor* weight = (const Factor*)(own.scores + query * columns) + block * lines * (LANES / NUMBERS);
            auto multiply = [&](int64_t row, auto load_values) {
                Vector v[N];
                for (int n = 0; n < N; n++) {
                    if (n * LANES * sizeof(T) % CACHE_LINE == 0)
                        __builtin_prefetch(next + row * padded + n * LANES, 0, LEVEL_2);
                    v[n] = load_values(value + row * padded + n * LANES);
                }
                UNROLLED for (int m = 0; m < M; m++)
                    UNROLLED for (int n = 0; n < N; n++)
                        sums[m][n] = add_product(sums[m][n], weight[m * columns + row], v[n]);
            };
            // The other number of a pair may be uninitialised.
            auto only = [](uint32_t bits) { return [=](const T* p) { return (Vector)((Int)load(p) & (int32_t)bits); }; };
            int64_t from = std::max<int64_t>(0, first_seen(tile.position) - (first + block) * size);
            int64_t to = std::min(size, tile.position + tile.count - (first + block) * size);
            if (from % NUMBERS && from < to) multiply(from++ / NUMBERS, only(0xffff0000));
            for (int64_t row = from / NUMBERS; row < to / NUMBERS; row++) multiply(row, [](const T* p) { return load(p); });
            if (to % NUMBERS && from < to) multiply(to / NUMBERS, only(0xffff));
        }
        UNROLLED for (int m = 0; m < M; m++)
            UNROLLED for (int n = 0; n < N; n++) {
                float* to = out + m * padded + n * LANES;
                if constexpr (SCALED) store(to, __builtin_convertvector(sums[m][n], Vec) * own.weight_scales[query + m]);
                else store(to, sums[m][n]);
            }
    }

    template <int N, int M = FEW_QUERIES>
    void weigh_rows(int64_t rows, const Tile& tile, int64_t first, int64_t count, int64_t d, int64_t query,
                    const Space& own, float* out) const {
        if (rows == M) return weigh<M, N>(tile, first, count, d, query, own, out);
        if constexpr (M > 1) weigh_rows<N, M - 1>(rows, tile, first, count, d, query, own, out);
    }

    const Batch& batch;
    const AttentionShape& shape;
    const Inputs& in;
    KvPool<T> pool;
    int64_t group;         // query heads per KV head
    int64_t dims, padded;  // elements per key and per row of values in the pool
    bool bounded;          // whether a query does not see all earlier positions
    int64_t lines;         // registers for the keys of a block
    int64_t piece_blocks, columns;  // blocks of a piece, scores of a query in a piece
    std::vector<Tile> tiles;
    std::vector<Part> parts;  // ordered by tile, head and piece
    int64_t widest = 0, work = 0;  // queries of the largest tile, pieces of all tiles times their tokens
};

}  // namespace

extern "C" {

void attend(const Batch* batch, const AttentionShape* shape, const Inputs* in, void* keys, void* values) {
    if (shape->dtype == BF16) Attention(*batch, *shape, *in, (Bf16Pool*)keys, (Bf16Pool*)values).run();
    else if (shape->dtype == INT8) Attention(*batch, *shape, *in, (Int8Pair*)keys, (Int8Pair*)values).run();
    else if (shape->dtype == F16) Attention(*batch, *shape, *in, (Fp16*)keys, (Fp16*)values).run();
    else Attention(*batch, *shape, *in, (float*)keys, (float*)values).run();
}

int64_t lanes() { return LANES; }
}
