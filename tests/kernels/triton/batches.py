"""Random paged batches, and poison to prove what a kernel writes and reads."""

from dataclasses import dataclass

import torch

from pagewire.kernels.attention_layer import Attention, Batch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Absolute and relative, against float64."""


@dataclass
class Case:
    """Inputs of one attention step."""

    batch: Batch
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor

    def poisoned(self) -> torch.Tensor:
        """An output of NaN, all of which must be written."""
        return self.query.new_full((*self.query.shape[:2], self.value_cache.shape[3]), torch.nan)

    @property
    def live(self) -> int:
        return int(self.batch.cu_queries[-1])


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def paged_case(
    layer: Attention,
    rows: list[tuple[int, int]],
    *,
    seed: int = 0,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    padding: int = 0,
) -> Case:
    """`rows` are (queries, positions cached). Blocks are scattered; whatever no sequence owns is NaN."""
    random = torch.Generator().manual_seed(seed)
    blocks = [-(-length // block_size) for _, length in rows]
    width = max(blocks, default=0) + 2
    pool = sum(blocks) + 5
    slots = torch.randperm(len(rows) + 3, generator=random)[: len(rows)].int()
    key, value = (
        torch.full((pool, layer.kv_heads, block_size, size), torch.nan)
        for size in (layer.head_size, layer.value_head_size)
    )
    free = torch.randperm(pool, generator=random).tolist()
    tables = torch.full((len(rows) + 3, width), free.pop(), dtype=torch.int32)
    for slot, count, (_, length) in zip(slots.tolist(), blocks, rows, strict=True):
        for index in range(count):
            block = free.pop()
            tables[slot, index] = block
            filled = min(block_size, length - index * block_size)
            for cache in (key, value):
                cut = (layer.kv_heads, filled, cache.shape[3])
                cache[block, :, :filled] = torch.randn(cut, generator=random)
    queries = torch.tensor([0] + [count for count, _ in rows]).cumsum(0).int()
    query = torch.randn(int(queries[-1]) + padding, layer.heads, layer.head_size, generator=random)
    lengths = torch.tensor([length for _, length in rows], dtype=torch.int32)
    batch = Batch(slots.to(DEVICE), lengths.to(DEVICE), queries.to(DEVICE), tables.to(DEVICE))
    stored = cache_dtype or dtype
    return Case(batch, query.to(DEVICE, dtype), key.to(stored).to(DEVICE), value.to(stored).to(DEVICE))


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """A NaN for every element that must be written."""
    return torch.full_like(like, torch.nan)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Within the tolerance of `dtype`, NaN nowhere."""
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), rtol=limit, atol=limit)
