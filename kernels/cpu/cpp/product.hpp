// The frame of all matrix products: outputs are cut into panels of two registers, and panels into slices, which threads
// take one by one. A tile is one panel for some rows. A target receives the results of tiles.
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

constexpr int PANEL = 2 * LANES;           // outputs of a panel
constexpr int PREFETCH_BYTES = 8192;                // bytes between a prefetch and the use
constexpr int64_t CACHED_BYTES = 1 << 18;        // bytes of panels that stay in the level 2 cache
constexpr int64_t SLICES = 16, MIN_SLICES = 4;  // slices per thread: at most, and at least for an even share

// The outputs of one panel for some rows.
struct Tile {
    const float* bias;    // bias of the panel's outputs, or null
    int64_t row, first;   // first row and first output
    int64_t columns;      // number of outputs, at most PANEL
    int64_t slice;        // index of the tile's slice
    int64_t part, parts;  // index and number of the parts into which the rows are cut
    int64_t panel, next;  // index of the panel, and of the one to load meanwhile: the next panel, or with several parts
                          // the panel in the same place of the next run
};

// The prefetching of a product's tiles. Divisions take as long as a short tile, so they are done once.
struct PrefetchPlan {
    int64_t bytes, steps;  // bytes of a panel, and the steps in which a tile goes through it
    int64_t share;         // bytes that a step prefetches
    int64_t early;         // steps between a prefetch and the use, in a single part

    PrefetchPlan(int64_t bytes, int64_t steps, int64_t parts, int64_t distance)
        : bytes(bytes), steps(steps), share(bytes / steps / parts), early(parts == 1 ? distance / share : 0) {}
};

// Loads weights into the cache before they are needed, earlier than hardware does. If several tiles need a panel, each of
// them loads a share of the next one, because the first alone would wait for memory and the others use none. A share is
// a run of memory, which hardware prefetchers continue.
class Prefetcher {
public:
    Prefetcher(const Tile& tile, const void* panels, const PrefetchPlan& plan)
        : share(plan.share), steps(plan.steps), left(plan.steps), next((const char*)panels + tile.next * plan.bytes) {
        if (tile.parts == 1) {
            at = (const char*)panels + tile.panel * plan.bytes + plan.early * share;
            if (plan.early < plan.steps) left -= plan.early;  // else all steps load what lies beyond a short panel
        } else {
            at = next + tile.part * plan.steps * share;
        }
    }

    INLINED void step() {
        if (left-- == 0) at = next;
        UNROLLED for (int64_t line = 0; line < share; line += 64) __builtin_prefetch(at + line);
        at += share;
    }

    // Calls `step` for each step, and loads BYTES before it: for short steps, whose products take less time than
    // counting the steps until the next panel, or than a loop over lines.
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

    int64_t share, steps, left;  // bytes of a step, steps of a panel, and steps until the next panel
    const char *next, *at;
};

// A target that writes every output.
struct AllOutputs {
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

// The largest output of a row in a slice, the first of equal outputs. NaN counts as infinity.
struct Peak {
    float most = -INFINITE;
    int64_t at = 0;
};

// A target that only keeps the largest output of each row and writes none.
class LargestOutput {
public:
    explicit LargestOutput(int64_t rows) : rows(rows), bars(new std::atomic<float>[rows]) {
        for (int64_t row = 0; row < rows; row++) bars[row] = -INFINITE;
    }

    void prepare(int64_t slices) { peaks.resize(rows * slices); }

    // Returns whether an output may be the largest: nearly all are less than an earlier one of the row, by any thread.
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

    // Returns the peak of a row, at `NOT_FINITE` if there is none.
    Peak of(int64_t row) const {
        Peak best = peaks[row];
        for (size_t i = row + rows; i < peaks.size(); i += rows)
            if (peaks[i].most > best.most) best = peaks[i];
        return {best.most, std::abs(best.most) < INFINITE ? best.at : NOT_FINITE};
    }

private:
    // When threads raise a bar at the same time, the lower value may stay, which is only less strict.
    [[gnu::noinline]] void keep(const Tile& tile, int64_t m, Vec left, Vec right) {
        Vec both[] = {countable(left), countable(right)};
        float most = largest(larger(both[0], both[1]));
        Peak& best = peaks[tile.slice * rows + tile.row + m];
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
    std::vector<Peak> peaks;  // [slices, rows]
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

// Calls multiply(tile, count) for every panel and every `count` rows, at most `most`. A run is as many panels as the cache
// keeps, `together`: all parts of the rows use them before the next run begins. A single part needs no panel twice, so
// its run is a whole slice. Each thread copies `multiply`, which may hold the state of a thread.
template <typename Target, typename Multiply>
void for_tiles(const Weights& weights, int64_t rows, int64_t most, int64_t together, Target& target, int threads,
               const Multiply& multiply) {
    int64_t panels = (weights.outputs + PANEL - 1) / PANEL, parts = (rows + most - 1) / most;
    int64_t size = weights.inputs * PANEL;
    // Runs are shorter where the threads would have too little to share.
    int64_t most_run = std::min(together, panels * parts / (MIN_SLICES * threads));
    int64_t run = parts == 1 ? 1 : std::max<int64_t>(1, most_run);
    int64_t slices = std::min((panels + run - 1) / run, SLICES * threads);
    // Rows are divided into groups if there are too few outputs for threads to share them evenly.
    int64_t groups = threads > 1 && slices < MIN_SLICES * threads ? std::min(parts, SLICES * threads) : 1;
    if (rows * panels * size < SERIAL_PRODUCTS) threads = 1;
    target.prepare(slices);

    auto multiply_run = [&](Multiply& own, int64_t slice, int64_t group, int64_t begin, int64_t end, int64_t next) {
        for (int64_t part = parts * group / groups; part < parts * (group + 1) / groups; part++) {
            int64_t row = rows * part / parts, count = rows * (part + 1) / parts - row;
            for (int64_t p = begin; p < end; p++) {
                int64_t first = p * PANEL, columns = std::min<int64_t>(PANEL, weights.outputs - first);
                const float* bias = weights.bias ? weights.bias + first : nullptr;
                int64_t after = parts > 1 ? next + p - begin : p + 1 < end ? p + 1 : next;
                own(Tile{bias, row, first, columns, slice, part, parts, p, after}, count);
            }
        }
    };
    parallel(slices * groups, 1, threads, [&](int64_t from, int64_t to) {
        Multiply own = multiply;
        for (int64_t at = from; at < to; at++) {
            int64_t slice = at / groups, begin = panels * slice / slices, last = panels * (slice + 1) / slices;
            int64_t runs = parts == 1 ? 1 : (last - begin + run - 1) / run, length = (last - begin + runs - 1) / runs;
            for (int64_t end; begin < last; begin = end) {
                end = std::min(begin + length, last);
                // Threads take slices in order, so that the other threads probably take the slices in between.
                int64_t next = end < last ? end : panels * (slice + threads) / slices;
                multiply_run(own, slice, at % groups, begin, end, next);
            }
        }
    });
}
