// What all matrix products share: how the outputs are cut into tiles and given to threads, and where results go.
//
// Outputs are cut into panels of two registers, so that one tile is a panel for some rows.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "kernels.hpp"
#include "parallel.hpp"
#include "vector.hpp"

constexpr int PANEL = 2 * LANES;
constexpr int AHEAD = 8192;  // prefetch distance, bytes
constexpr int64_t SMALL = 1 << 17;  // multiplications below which starting a helper thread takes longer than the work
constexpr int64_t CACHED = 1 << 18;  // bytes of panels that are kept in the level 2 cache
constexpr int64_t CHUNKS = 16, FEW_CHUNKS = 4;  // chunks of outputs per thread
constexpr int64_t ROUNDED = 1 << 14;  // numbers below which starting a helper thread takes longer than rounding them

// The outputs of one panel for some rows.
struct Tile {
    const float* bias;  // or null
    int64_t row, first;
    int64_t columns;  // number of outputs, at most PANEL
    int64_t chunk;    // index of the tile's chunk
    int64_t part, parts;  // rows are cut into `parts`; this is the tile of one of them
    int64_t panel, next;  // `next` is loaded meanwhile: with several parts, the panel in the same place of the next run
};

// How the tiles of a product prefetch. Divisions take as long as a short tile, so they are done once.
struct Pace {
    int64_t bytes, steps;  // of a panel
    int64_t share;         // bytes of a step
    int64_t early;         // steps between a prefetch and the use, in a single part

    Pace(int64_t bytes, int64_t steps, int64_t parts, int64_t distance)
        : bytes(bytes), steps(steps), share(bytes / steps / parts), early(parts == 1 ? distance / share : 0) {}
};

// Loads weights into the cache before they are needed, earlier than hardware does. If several tiles need a panel, each of
// them loads a share of the next one, because the first alone would wait for memory and the others use none. A share is
// a run of memory, which hardware prefetchers continue.
class Ahead {
public:
    Ahead(const Tile& tile, const void* panels, const Pace& pace)
        : share(pace.share), steps(pace.steps), left(pace.steps), next((const char*)panels + tile.next * pace.bytes) {
        if (tile.parts == 1) {
            at = (const char*)panels + tile.panel * pace.bytes + pace.early * share;
            if (pace.early < pace.steps) left -= pace.early;  // else all steps load what lies beyond a short panel
        } else {
            at = next + tile.part * pace.steps * share;
        }
    }

    INLINED void step() {
        if (left-- == 0) at = next;
        UNROLLED for (int64_t line = 0; line < share; line += 64) __builtin_prefetch(at + line);
        at += share;
    }

    // Calls `step` for each step, and loads BYTES before it. For steps that take so few instructions that counting those
    // until the next panel, or a loop over lines, would take longer than their products.
    template <int64_t BYTES, typename Step>
    INLINED void each_step(const Step& step) {
        run<BYTES>(left, step);
        at = next;
        run<BYTES>(steps - left, step);
    }

private:
    template <int64_t BYTES, typename Step>
    INLINED void run(int64_t count, const Step& step) {
        for (int64_t i = 0; i < count; i++, at += BYTES) {
            UNROLLED for (int64_t line = 0; line < BYTES; line += 64) __builtin_prefetch(at + line);
            step();
        }
    }

    int64_t share, steps, left;  // bytes of a step, all steps, and those until the next panel
    const char *next, *at;
};

// Target that writes every output.
struct Whole {
    float* out;
    int64_t stride;

    void prepare(int64_t) {}

    bool wants(const Tile&, int64_t, Vec, Vec) const { return true; }

    void take(const Tile& tile, int64_t m, Vec left, Vec right) {
        float* row = place(tile, m);
        store(row, left);
        store(row + LANES, right);
    }

    void take_some(const Tile& tile, int64_t m, Vec left, Vec right) {
        Vec both[] = {left, right};
        std::memcpy(place(tile, m), both, tile.columns * sizeof(float));
    }

    float* place(const Tile& tile, int64_t m) { return out + (tile.row + m) * stride + tile.first; }
};

// The largest output, the first of equal ones. NaN counts as infinity.
struct Peak {
    float most = -INFINITE;
    int64_t at = 0;
};

// Target that only keeps the largest output of each row and writes none.
class Largest {
public:
    explicit Largest(int64_t rows) : rows(rows), bars(new std::atomic<float>[rows]) {
        for (int64_t row = 0; row < rows; row++) bars[row] = -INFINITE;
    }

    void prepare(int64_t chunks) { peaks.resize(rows * chunks); }

    // Nearly all outputs are less than an earlier one of the row, by any thread.
    bool wants(const Tile& tile, int64_t m, Vec left, Vec right) const {
        return !all_less(left, right, splat(bars[tile.row + m].load(std::memory_order_relaxed)));
    }

    void take(const Tile& tile, int64_t m, Vec left, Vec right) {
        if (wants(tile, m, left, right)) keep(tile, m, left, right);
    }

    void take_some(const Tile& tile, int64_t m, Vec left, Vec right) {
        Vec both[] = {left, right};
        for (int64_t i = tile.columns; i < PANEL; i++) both[i / LANES][i % LANES] = -INFINITE;
        take(tile, m, both[0], both[1]);
    }

    int64_t at(int64_t row) const {
        Peak best = peaks[row];
        for (size_t i = row + rows; i < peaks.size(); i += rows)
            if (peaks[i].most > best.most) best = peaks[i];
        return std::abs(best.most) < INFINITE ? best.at : NOT_FINITE;
    }

private:
    // When threads raise a bar at the same time, the lower value may stay, which is only less strict.
    [[gnu::noinline]] void keep(const Tile& tile, int64_t m, Vec left, Vec right) {
        Vec both[] = {countable(left), countable(right)};
        float most = largest(larger(both[0], both[1]));
        Peak& best = peaks[tile.chunk * rows + tile.row + m];
        if (most <= best.most) return;
        int64_t i = 0;
        while (both[i / LANES][i % LANES] != most) i++;
        best = {most, tile.first + i};
        std::atomic<float>& bar = bars[tile.row + m];
        bar.store(std::max(bar.load(std::memory_order_relaxed), most), std::memory_order_relaxed);
    }

    static Vec countable(Vec v) { return v != v ? splat(INFINITE) : v; }

    int64_t rows;
    std::unique_ptr<std::atomic<float>[]> bars;  // lower bound of the largest output of each row so far
    std::vector<Peak> peaks;  // [chunks, rows]
};

// Gives the results of the rows M of a tile to the target.
template <typename Target, size_t... M>
INLINED inline void finish(const Tile& tile, Vec* left, Vec* right, Target& target, std::index_sequence<M...>) {
    if (tile.bias) {
        Vec l = load(tile.bias), r = load(tile.bias + LANES);
        ((left[M] += l, right[M] += r), ...);
    }
    if (tile.columns < PANEL) (target.take_some(tile, M, left[M], right[M]), ...);
    // One test for all rows, because the result is nearly always false.
    else if ((target.wants(tile, M, left[M], right[M]) | ...)) (target.take(tile, M, left[M], right[M]), ...);
}

// Calls multiply(tile, count) for every panel and every `count` rows, at most `most`. As many panels as the cache
// keeps, `together`, are a run: all parts of the rows use them before the next ones. A single part needs no panel twice,
// so that its run is a whole chunk. Threads copy `multiply`, which may thus hold state of a thread.
template <typename Target, typename Multiply>
void for_tiles(const Weights& weights, int64_t rows, int64_t most, int64_t together, Target& target, int threads,
               const Multiply& multiply) {
    int64_t panels = (weights.outputs + PANEL - 1) / PANEL, parts = (rows + most - 1) / most;
    int64_t size = weights.inputs * PANEL;
    // Fewer where the threads would have too little to share.
    int64_t most_run = std::min(together, panels * parts / (FEW_CHUNKS * threads));
    int64_t run = parts == 1 ? 1 : std::max<int64_t>(1, most_run);
    int64_t chunks = std::min((panels + run - 1) / run, CHUNKS * threads);
    // Of rows, if there are too few outputs for threads to share them evenly.
    int64_t groups = threads > 1 && chunks < FEW_CHUNKS * threads ? std::min(parts, CHUNKS * threads) : 1;
    if (rows * panels * size < SMALL) threads = 1;
    target.prepare(chunks);

    auto multiply_run = [&](Multiply& own, int64_t chunk, int64_t group, int64_t begin, int64_t end, int64_t next) {
        for (int64_t part = parts * group / groups; part < parts * (group + 1) / groups; part++) {
            int64_t row = rows * part / parts, count = rows * (part + 1) / parts - row;
            for (int64_t p = begin; p < end; p++) {
                int64_t first = p * PANEL, columns = std::min<int64_t>(PANEL, weights.outputs - first);
                const float* bias = weights.bias ? weights.bias + first : nullptr;
                int64_t after = parts > 1 ? next + p - begin : p + 1 < end ? p + 1 : next;
                own(Tile{bias, row, first, columns, chunk, part, parts, p, after}, count);
            }
        }
    };
    parallel(chunks * groups, 1, threads, [&](int64_t from, int64_t to) {
        Multiply own = multiply;
        for (int64_t at = from; at < to; at++) {
            int64_t chunk = at / groups, begin = panels * chunk / chunks, last = panels * (chunk + 1) / chunks;
            int64_t runs = parts == 1 ? 1 : (last - begin + run - 1) / run, length = (last - begin + runs - 1) / runs;
            for (int64_t end; begin < last; begin = end) {
                end = std::min(begin + length, last);
                // Chunks are taken in order, so that the other threads probably take those in between.
                int64_t next = end < last ? end : panels * (chunk + threads) / chunks;
                multiply_run(own, chunk, at % groups, begin, end, next);
            }
        }
    });
}
