"""Ranks that share memory, each on a thread of this process."""

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pagewire.kernels.cpu.collectives import SharedMemoryCollectives, memory_bytes
from pagewire.kernels.cpu.kernels import CpuKernels
from tests.support.waiting import PATIENCE

T = TypeVar("T")


def shared_ranks(kernels: CpuKernels, size: int) -> list[SharedMemoryCollectives]:
    """The view of each rank."""
    memory = mmap.mmap(-1, memory_bytes(kernels, size))
    return [SharedMemoryCollectives(kernels, memory, rank, size) for rank in range(size)]


def on_each(ranks: Sequence[SharedMemoryCollectives], call: Callable[[SharedMemoryCollectives], T]) -> list[T]:
    """The results of all ranks. One that fails ends the waits of the others."""

    def run(rank: SharedMemoryCollectives) -> T:
        try:
            return call(rank)
        except BaseException:
            rank.abort()
            raise

    with ThreadPoolExecutor(len(ranks)) as threads:
        running = [threads.submit(run, rank) for rank in ranks]
        return [one.result(PATIENCE) for one in running]
