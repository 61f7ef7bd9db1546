"""The ranks other than 0 of a model on a CPU, and the memory that all ranks share."""

import mmap
import os
from pathlib import Path

from typing_extensions import override

from pagewire.kernels.cpu.collectives import SharedMemoryCollectives, memory_bytes
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.services.executor import rank_processes
from pagewire.services.executor.devices.cpu.ranks.shared_calls import CallSizes, SharedCalls
from pagewire.services.executor.devices.protocol import Capacity
from pagewire.services.executor.devices.ranks.followers import Followers
from pagewire.services.executor.devices.ranks.startup import Sizes
from pagewire.shared.settings.config import Settings


class CpuFollowers(Followers):
    """Ranks whose calls are in memory that all share.

    Attributes:
        collectives: rank 0's view of all ranks.
    """

    def __init__(self, settings: Settings, folder: Path, kernels: CpuKernels) -> None:
        """Tells a process per rank what to load, each with as many threads as `kernels` have."""
        size = settings.tensor_parallel_size
        started = rank_processes.take("cpu", size)
        self._memory, self._first = started.memory, memory_bytes(kernels, size)
        os.ftruncate(self._memory, self._first)
        self.collectives = SharedMemoryCollectives(kernels, mmap.mmap(self._memory, self._first), 0, size)
        super().__init__(started, settings, folder, kernels.threads)

    @override
    def abort(self) -> None:
        self.collectives.abort()

    def open_calls(self, capacity: Capacity, width: int) -> SharedCalls:
        """Tells all ranks the capacity, waits until they are ready for calls, and watches them from then on.

        Raises:
            DeviceLost: a rank has ended, or does not arrive in time.
        """
        sizes = CallSizes.of(capacity, width)
        os.ftruncate(self._memory, self._first + sizes.nbytes)
        calls = SharedCalls(mmap.mmap(self._memory, sizes.nbytes, offset=self._first), sizes, self.collectives)
        self.tell(Sizes(capacity))
        self.await_ready()
        self.watch(calls.heartbeats)
        return calls
