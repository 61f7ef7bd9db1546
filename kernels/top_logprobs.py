"""The most probable tokens of a row with their logarithms, without a sort and without a copy of the logits."""

import torch
import triton
import triton.language as tl

from pagewire.kernels.jit import Configuration, jit

TILE = 4096
WARPS = 8
SLICE = 256
"""Rows per launch: bounds the scratch memory, however long a prompt is scored."""


@jit
def best_of_tile_kernel(
    values: tl.tensor,
    ids: tl.tensor,
    logsums: tl.tensor,
    logits: tl.tensor,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    MOST: tl.constexpr,
) -> None:
    """One program: the MOST largest logits of one tile of one row, and the tile's log of summed exponentials."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * VOCABULARY + token, mask=token < VOCABULARY, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp(x - base), 0)
    logsum = tl.where(total > 0, base + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    place = row * TILES + tile
    tl.store(logsums + place, logsum)
    left = token < VOCABULARY
    for rank in range(MOST):
        best = tl.max(tl.where(left, x, float("-inf")), 0)
        chosen = tl.min(tl.where(left & (x == best), token, VOCABULARY), 0)
        tl.store(values + place * MOST + rank, best)
        tl.store(ids + place * MOST + rank, chosen)
        left = left & (token != chosen)


@jit
def best_of_row_kernel(
    top_ids: tl.tensor,
    top: tl.tensor,
    chosen: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    logsums: tl.tensor,
    logits: tl.tensor,
    tokens: tl.tensor,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    MOST: tl.constexpr,
    PADDED_TILES: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """One program: the best of the tiles' best."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, PADDED_TILES)
    sums = tl.load(logsums + row * TILES + tile, mask=tile < TILES, other=float("-inf"))
    peak = tl.max(sums, 0)
    logsum = peak + tl.log(tl.sum(tl.exp(sums - peak), 0))
    token = tl.load(tokens + row)
    picked = tl.load(logits + row * VOCABULARY + token, mask=token >= 0, other=0.0).to(tl.float32)
    tl.store(chosen + row, tl.where(token >= 0, picked - logsum, 0.0))
    lane = tl.arange(0, PADDED)
    x = tl.load(values + row * (TILES * MOST) + lane, mask=lane < TILES * MOST, other=float("-inf"))
    name = tl.load(ids + row * (TILES * MOST) + lane, mask=lane < TILES * MOST, other=VOCABULARY)
    left = name < VOCABULARY
    for rank in range(MOST):
        best = tl.max(tl.where(left, x, float("-inf")), 0)
        first = tl.min(tl.where(left & (x == best), name, VOCABULARY), 0)
        tl.store(top + row * MOST + rank, best - logsum)
        tl.store(top_ids + row * MOST + rank, first)
        left = left & (name != first)


def top_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, top_ids: torch.Tensor, top: torch.Tensor, chosen: torch.Tensor
) -> None:
    """The N largest log-probabilities of each row, largest first, the lower id first among equals.

    `logits` [R, vocabulary] of any float type, as the model gave them; `tokens` int32 [R] the sampled ids, -1: none.
    Written: `top_ids` int32 [R, N], `top` float32 [R, N], `chosen` float32 [R] the sampled token's own, 0 for none.
    N is at most the vocabulary.
    """
    vocabulary, most = logits.shape[1], top.shape[1]
    tiles = triton.cdiv(vocabulary, TILE)
    slice_ = min(SLICE, len(logits))
    values = torch.empty(slice_, tiles, most, device=logits.device)
    ids = torch.empty(slice_, tiles, most, dtype=torch.int32, device=logits.device)
    logsums = torch.empty(slice_, tiles, device=logits.device)
    sizes = {"VOCABULARY": vocabulary, "TILES": tiles, "MOST": most}
    for first in range(0, len(logits), SLICE):
        part = slice(first, first + SLICE)
        rows = len(logits[part])
        best_of_tile_kernel[rows, tiles](values, ids, logsums, logits[part], **sizes, TILE=TILE, num_warps=WARPS)
        best_of_row_kernel[(rows,)](
            top_ids[part],
            top[part],
            chosen[part],
            values,
            ids,
            logsums,
            logits[part],
            tokens[part],
            **sizes,
            PADDED_TILES=triton.next_power_of_2(tiles),
            PADDED=triton.next_power_of_2(tiles * most),
        )


def reference(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`top_ids`, `top` and `chosen` of `top_logprobs`, in float64."""
    logprobs = logits.double().log_softmax(-1)
    top, top_ids = logprobs.sort(descending=True, stable=True)
    chosen = logprobs.gather(1, tokens.clamp(min=0).long()[:, None])[:, 0]
    return top_ids[:, :most], top[:, :most], torch.where(tokens >= 0, chosen, 0)


def configurations() -> list[Configuration]:
    """Forms that a device launches, for `pagewire.kernels.compile`."""
    found = []
    for vocabulary, dtype, most in ((128256, "fp32", 20), (151936, "bf16", 1)):
        tiles = triton.cdiv(vocabulary, TILE)
        sizes = {"VOCABULARY": vocabulary, "TILES": tiles, "MOST": most}
        scratch = {"values": "fp32", "ids": "i32", "logsums": "fp32", "logits": dtype}
        padded = {"PADDED_TILES": triton.next_power_of_2(tiles), "PADDED": triton.next_power_of_2(tiles * most)}
        row = {**scratch, "top_ids": "i32", "top": "fp32", "chosen": "fp32", "tokens": "i32"}
        name = f"{vocabulary} {dtype} {most}"
        tile = {**sizes, "TILE": TILE}
        options = {"num_warps": WARPS}
        found.append(Configuration(f"tile {name}", best_of_tile_kernel, scratch, tile, options, spills=False))
        found.append(Configuration(f"row {name}", best_of_row_kernel, row, {**sizes, **padded}, spills=False))
    return found
