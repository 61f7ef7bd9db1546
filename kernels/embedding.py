"""The rows of a table that token ids, or positions, name."""

import torch
import triton
import triton.language as tl

from pagewire.kernels.jit import Configuration, jit

BLOCK = 1024


@jit
def embedding_kernel(out: tl.tensor, ids: tl.tensor, table: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """One program: BLOCK features of one token."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    source = tl.load(ids + row).to(tl.int64) * SIZE
    tl.store(out + row * SIZE + column, tl.load(table + source + column, mask=mask), mask=mask)


def embedding(ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """`out` [T, size] = table[ids]: `ids` int32 [T] in [0, vocabulary), `table` [vocabulary, size], contiguous."""
    size = table.shape[1]
    embedding_kernel[len(ids), triton.cdiv(size, BLOCK)](out, ids, table, SIZE=size, BLOCK=BLOCK)


def reference(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """What `embedding` writes."""
    return table[ids.long()]


def configurations() -> list[Configuration]:
    """Forms that a device launches, for `pagewire.kernels.compile`."""
    return [
        Configuration(
            f"{size} {dtype}",
            embedding_kernel,
            {"out": dtype, "ids": "i32", "table": dtype},
            {"SIZE": size, "BLOCK": BLOCK},
        )
        for size, dtype in ((768, "bf16"), (4096, "bf16"), (5120, "bf16"), (4096, "fp32"))
    ]
