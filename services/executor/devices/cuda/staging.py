"""Copies from the host to the device through a ring of pinned buffers, which the host never overwrites too early."""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pagewire.services.executor.devices.cuda.runtime import Moment, Runtime

Int32 = npt.NDArray[np.int32]


class StagingRing:
    """`depth` pinned buffers of `entries` int32 numbers. A buffer is reused only after its copy has ended."""

    def __init__(self, runtime: Runtime, depth: int, entries: int) -> None:
        self._runtime = runtime
        self._buffers = [runtime.pinned(entries) for _ in range(depth)]
        self._views: list[Int32] = [buffer.numpy() for buffer in self._buffers]
        self._copied: list[Moment | None] = [None] * depth
        self._next = 0

    def send(self, values: Int32, target: Tensor) -> None:
        """Enqueues target[: len(values)] = values and returns without waiting; `target` is int32 on the device."""
        index, count = self._next, len(values)
        copied = self._copied[index]
        if copied is not None:
            copied.wait()
        self._views[index][:count] = values
        target[:count].copy_(self._buffers[index][:count], non_blocking=True)
        self._copied[index] = self._runtime.mark()
        self._next = (index + 1) % len(self._buffers)
