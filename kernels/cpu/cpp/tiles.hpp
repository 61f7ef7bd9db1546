// Matrix products in bf16 by AMX, whose registers are tiles: one instruction multiplies up to 16 rows of 32 inputs with
// 32 inputs of 16 outputs, and adds to sums in float32.
//
// The weights of 32 inputs and half a panel are such a tile already, in the layout of `CpuKernels.pack` for pairs. A
// product of 32 inputs is the same in a tile of any number of rows, and products are added in the order of the inputs, so
// that a row's result does not depend on the other rows.
#pragma once

#if defined(__AMX_BF16__)

#include <sys/syscall.h>
#include <unistd.h>

#include "product.hpp"

constexpr int TILE_ROWS = 16;
constexpr int64_t DEEP = DEPTH / 2;  // pairs of inputs in a tile

// Returns whether this process may use tiles. Linux wants to be asked, because their state is saved for each thread; it
// refuses if a signal stack is too small for it.
inline bool tiles_allowed() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM and a state of XSAVE, see arch_prctl(2)
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return allowed;
}

// Multiplies up to two tiles of rows with a panel. A copy belongs to one thread, whose tiles it configures and releases.
template <typename Target>
class TileProduct {
public:
    TileProduct(const Pair* x, int64_t pairs, const Weights& weights, Target& target)
        : x(x), pairs(pairs), weights(weights), target(target) {}

    ~TileProduct() {
        if (configured) _tile_release();
    }

    void operator()(const Tile& tile, int64_t count) {
        if (count != configured) configure(count);
        const Pair* rows = x + tile.row * pairs;
        const Pair* columns = (const Pair*)weights.panels + tile.panel * pairs * PANEL;
        alignas(64) float sums[2 * TILE_ROWS][PANEL];
        count > TILE_ROWS ? multiply<true>(rows, columns, sums) : multiply<false>(rows, columns, sums);
        Tile one = tile;
        for (int64_t m = 0; m < count; m++, one.row++) {
            Vec left = load(sums[m]), right = load(sums[m] + LANES);
            finish(one, &left, &right, target, std::make_index_sequence<1>());
        }
    }

private:
    // Tiles 0 to 3 are sums, 4 and 5 weights, 6 and 7 rows.
    void configure(int64_t count) {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {};  // bytes per row of each tile
            uint8_t rows[16] = {};
        } config;
        uint8_t upper = std::min<int64_t>(count, TILE_ROWS), lower = count - upper;
        const uint8_t rows[] = {upper, upper, lower, lower, DEEP, DEEP, upper, lower};
        for (int i = 0; i < 8; i++) {
            config.rows[i] = rows[i];
            config.bytes[i] = rows[i] ? 64 : 0;
        }
        asm volatile("" ::: "memory");  // the intrinsics do not tell the compiler all that they read
        _tile_loadconfig(&config);
        configured = count;
    }

    template <bool TWO>
    void multiply(const Pair* rows, const Pair* columns, float (*sums)[PANEL]) const {
        constexpr int64_t STRIDE = PANEL * sizeof(float);
        const int64_t width = pairs * sizeof(Pair);
        asm volatile("" ::: "memory");
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (TWO) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t k = 0; k < pairs; k += DEEP, rows += DEEP, columns += DEEP * PANEL) {
            for (int64_t line = 0; line < DEEP * PANEL * 4; line += 64)
                __builtin_prefetch((const char*)columns + PREFETCH_BYTES + line);
            _tile_loadd(6, rows, width);
            _tile_loadd(4, columns, STRIDE);
            _tile_dpbf16ps(0, 6, 4);
            _tile_loadd(5, columns + LANES, STRIDE);
            _tile_dpbf16ps(1, 6, 5);
            if constexpr (TWO) {
                _tile_loadd(7, rows + TILE_ROWS * pairs, width);
                _tile_dpbf16ps(2, 7, 4);
                _tile_dpbf16ps(3, 7, 5);
            }
        }
        _tile_stored(0, sums[0], STRIDE);
        _tile_stored(1, sums[0] + LANES, STRIDE);
        if constexpr (TWO) {
            _tile_stored(2, sums[TILE_ROWS], STRIDE);
            _tile_stored(3, sums[TILE_ROWS] + LANES, STRIDE);
        }
    }

    const Pair* x;
    int64_t pairs;
    const Weights& weights;
    Target& target;
    int64_t configured = 0;  // number of rows for which the tiles are configured
};

// Multiplies rows `x` of `pairs` pairs, a multiple of DEEP.
template <typename Target>
void multiply_tiles(const Pair* x, int64_t pairs, const Weights& weights, Target& target, int64_t rows, int threads) {
    constexpr int64_t MOST = 2 * TILE_ROWS, IN_CACHE = 1 << 19;  // rows of a call; bytes of panels in the 2 MiB of cache
    int64_t together = IN_CACHE / (pairs * PANEL * sizeof(Pair));
    for_tiles(weights, rows, MOST, together, target, threads, TileProduct(x, pairs, weights, target));
}

#endif
