"""Adapters (LoRA): low-rank updates that are added to a product, of all adapters of a step in two launches.

The first multiplies the inputs with the narrow factors, the second adds the product with the other factors to the
outputs. Tokens are gathered into tiles of one adapter each. A grid has programs for as many tiles as there may be, and
those without a tile end at once: what is launched does not depend on the adapters of a step. Sums have a fixed order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagewire.kernels.low_rank import LowRank
from pagewire.kernels.triton.dependent_launch import launch_options, wait_for_previous
from pagewire.kernels.triton.jit import jit

ROWS = 16
"""Tokens of a tile."""
RANKS = 16
"""Ranks of a program of the first launch; the ranks of each update are padded to a multiple of it."""
DEPTH = 128
"""Inputs that are multiplied at a time."""
COLUMNS = 64
"""Outputs of a program of the second launch."""
PARTS = 3
"""Updates of one product, at most: of queries, keys and values."""
FIELDS = 2 + 4 * PARTS
"""Numbers of a product in the table: where its narrow factors begin and how many ranks they have, then of each update
its first output, the output after its last one, its ranks, and where its other factor begins. Places in memory are
counted in units of RANKS numbers."""
MOST_SPLITS = 8
"""Programs that share the inputs of a product, at most. It is so for any number of tokens, which then change no sum."""
FEWEST_STEPS = 4
"""Steps of a program's loop, at least, if it shares the inputs."""


@dataclass(frozen=True, slots=True)
class Updates:
    """The factors of all adapters on the device, each in its place. The first dimension is missing in a single one."""

    factors: torch.Tensor
    """[places, size], in the dtype of the model."""
    table: torch.Tensor
    """int32 [places, products, FIELDS]; factors are counted from the beginning of a place."""
    scales: torch.Tensor
    """float32 [places, products, PARTS], the scale of each update."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tokens of one step that adapters update, gathered by adapter. There may be room for more than it needs."""

    tiles: torch.Tensor
    """int32 [tiles, 3] place of the adapter, index in `tokens` of the tile's first token and behind its last one;
    place -1: the tile is empty."""
    tokens: torch.Tensor
    """int32 [tokens] their indices in the step."""


def most_tiles(tokens: int, adapters: int) -> int:
    """Returns how many tiles a step of `tokens` tokens may have with the tokens of `adapters` adapters.

    >>> most_tiles(1, 8), most_tiles(8, 8), most_tiles(512, 8)
    (1, 8, 39)
    """
    return min(tokens, -(-tokens // ROWS) + min(tokens, adapters) - 1)


def splits_of(inputs: int) -> int:
    """Returns how many programs share the inputs of a product.

    >>> splits_of(4096), splits_of(1100), splits_of(64)
    (8, 2, 1)
    """
    splits, steps = 1, -(-inputs // DEPTH)
    while splits < MOST_SPLITS and steps >= 2 * splits * FEWEST_STEPS:
        splits *= 2
    return splits


def padded(rank: int) -> int:
    """Returns the ranks that an update has in memory."""
    return -(-rank // RANKS) * RANKS


def size_of(updates: Mapping[int, Sequence[LowRank]]) -> int:
    """Returns how many numbers the factors of an adapter have in memory."""
    every = (one for several in updates.values() for one in several)
    return sum(padded(len(one.shrink)) * (one.shrink.shape[1] + len(one.expand)) for one in every)


def pack(updates: Mapping[int, Sequence[LowRank]], packed: Updates) -> None:
    """Writes the updates of an adapter, by the numbers of their products, to `packed`: a single one, all zeros."""
    begin = 0
    for product, several in updates.items():
        fields = [begin // RANKS, sum(padded(len(one.shrink)) for one in several)]
        for one in several:
            rank, inputs = one.shrink.shape
            end = begin + padded(rank) * inputs
            packed.factors[begin:end].view(-1, inputs)[:rank] = one.shrink
            begin = end
        for part, one in enumerate(several):
            outputs, rank = one.expand.shape
            end = begin + padded(rank) * outputs
            packed.factors[begin:end].view(outputs, -1)[:, :rank] = one.expand
            packed.scales[product, part] = one.scale
            fields += [one.first, one.first + outputs, padded(rank), begin // RANKS]
            begin = end
        packed.table[product, : len(fields)] = torch.tensor(fields)


@jit
def shrink_kernel(
    partial: tl.tensor,
    x: tl.tensor,
    factors: tl.tensor,
    table: tl.tensor,
    tiles: tl.tensor,
    tokens: tl.tensor,
    size: tl.int32,
    product: tl.int32,
    products: tl.int32,
    width: tl.int32,
    count: tl.int32,
    INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: RANKS sums of one tile over one of SPLITS shares of the inputs, of a step of `count` tokens.

    A place has `size` times RANKS numbers.
    """
    wait_for_previous(PDL)
    STEPS: tl.constexpr = (INPUTS + DEPTH * SPLITS - 1) // (DEPTH * SPLITS)
    tile = tiles + tl.program_id(0) * 3
    adapter = tl.load(tile).to(tl.int64)
    if adapter < 0:
        return
    fields = table + (adapter * products + product) * FIELDS
    rank = tl.program_id(1) * RANKS
    if rank >= tl.load(fields + 1):
        return
    split = tl.program_id(2)
    index = tl.load(tile + 1) + tl.arange(0, ROWS)
    real = index < tl.load(tile + 2)
    token = tl.load(tokens + index, mask=real, other=0).to(tl.int64)
    ranks = rank + tl.arange(0, RANKS)
    narrow = factors + (adapter * size + tl.load(fields)) * RANKS
    total = tl.zeros((ROWS, RANKS), tl.float32)
    for step in range(STEPS):
        inner = (split * STEPS + step) * DEPTH + tl.arange(0, DEPTH)
        within = inner < INPUTS
        left = tl.load(x + token[:, None] * INPUTS + inner[None, :], mask=real[:, None] & within[None, :], other=0.0)
        right = tl.load(narrow + ranks[None, :].to(tl.int64) * INPUTS + inner[:, None], mask=within[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    place = (split.to(tl.int64) * count + index[:, None]) * width + ranks[None, :]
    tl.store(partial + place, total, mask=real[:, None])


@jit
def expand_kernel(
    out: tl.tensor,
    partial: tl.tensor,
    factors: tl.tensor,
    table: tl.tensor,
    scales: tl.tensor,
    tiles: tl.tensor,
    tokens: tl.tensor,
    size: tl.int32,
    product: tl.int32,
    products: tl.int32,
    width: tl.int32,
    count: tl.int32,
    OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: COLUMNS outputs of one tile, of a step of `count` tokens."""
    wait_for_previous(PDL)
    tile = tiles + tl.program_id(0) * 3
    adapter = tl.load(tile).to(tl.int64)
    if adapter < 0:
        return
    entry = adapter * products + product
    fields = table + entry * FIELDS
    index = tl.load(tile + 1) + tl.arange(0, ROWS)
    real = index < tl.load(tile + 2)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, RANKS)
    row = index.to(tl.int64)[:, None] * width
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    before = 0
    for part in tl.static_range(PARTS):
        first = tl.load(fields + 2 + 4 * part)
        end = tl.load(fields + 3 + 4 * part)
        ranks = tl.load(fields + 4 + 4 * part)
        if (tl.program_id(1) * COLUMNS < end) & ((tl.program_id(1) + 1) * COLUMNS > first):
            scale = tl.load(scales + entry * PARTS + part)
            wide = factors + (adapter * size + tl.load(fields + 5 + 4 * part)) * RANKS
            own = (column >= first) & (column < end)
            for rank in range(0, ranks, RANKS):
                narrow = tl.zeros((ROWS, RANKS), tl.float32)
                for split in tl.static_range(SPLITS):
                    place = row + (count.to(tl.int64) * split * width + before + rank + lane)[None, :]
                    narrow += tl.load(partial + place, mask=real[:, None], other=0.0)
                right = tl.load(
                    wide + (column - first)[None, :].to(tl.int64) * ranks + (rank + lane)[:, None],
                    mask=own[None, :],
                    other=0.0,
                )
                total = tl.dot((narrow * scale).to(right.dtype), right, total, input_precision="ieee")
        before += ranks
    token = tl.load(tokens + index, mask=real, other=0).to(tl.int64)
    goal = out + token[:, None] * OUTPUTS + column[None, :]
    live = real[:, None] & (column < OUTPUTS)[None, :]
    total += tl.load(goal, mask=live, other=0.0).to(tl.float32)
    tl.store(goal, total.to(out.dtype.element_ty), mask=live)


def add_updates(
    x: torch.Tensor, out: torch.Tensor, updates: Updates, tiles: Tiles, product: int, most_ranks: int
) -> None:
    """Adds to `out` [T, outputs] what the adapters add to a product of x [T, inputs]. Both are contiguous.

    Args:
        x: inputs of the product.
        out: outputs of the product, of the same dtype.
        updates: the adapters.
        tiles: tokens of each.
        product: number of the product in the table.
        most_ranks: ranks of all updates of the product together, at most; a multiple of `RANKS`.
    """
    (tokens, inputs), outputs = x.shape, out.shape[1]
    (places, size), products = updates.factors.shape, updates.table.shape[1]
    splits, programs = splits_of(inputs), most_tiles(tokens, places)
    partial = x.new_empty(splits * tokens * most_ranks, dtype=torch.float32)
    numbers = size // RANKS, product, products, most_ranks, tokens
    fixed = {"SPLITS": splits, "FIELDS": FIELDS, "ROWS": ROWS, "RANKS": RANKS, **launch_options()}
    shrink_kernel[programs, most_ranks // RANKS, splits](
        partial,
        x,
        updates.factors,
        updates.table,
        tiles.tiles,
        tiles.tokens,
        *numbers,
        INPUTS=inputs,
        DEPTH=DEPTH,
        num_warps=2,
        **fixed,
    )
    expand_kernel[programs, triton.cdiv(outputs, COLUMNS)](
        out,
        partial,
        updates.factors,
        updates.table,
        updates.scales,
        tiles.tiles,
        tiles.tokens,
        *numbers,
        OUTPUTS=outputs,
        PARTS=PARTS,
        COLUMNS=COLUMNS,
        **fixed,
    )
