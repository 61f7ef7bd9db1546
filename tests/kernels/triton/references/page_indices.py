"""The lists of blocks in PyTorch, which the kernel is compared with."""

from itertools import pairwise

from pagewire.kernels.attention_layer import Batch


def reference(batch: Batch, starts: list[int], window: int, dummy: int, block_size: int) -> list[int]:
    """Returns what `page_indices` writes."""
    blocks = []
    for row, (first, last) in enumerate(pairwise(starts)):
        length, queries = int(batch.lengths[row]), int(batch.cu_queries[row + 1] - batch.cu_queries[row])
        least = max(length - queries - window + 1, 0) if window else 0
        for entry in range(last - first):
            place = max(entry, least // block_size)
            blocks.append(int(batch.block_tables[batch.slots[row], place]) if length else dummy)
    return blocks
