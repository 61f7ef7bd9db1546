"""The runtime of a device under Triton's interpreter, where work is done as soon as it is enqueued."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from pagewire.services.executor.devices.cuda.runtime import Moment, Runtime


class HostMoment(Moment):
    """A moment that is already reached."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    @override
    def wait(self) -> None:
        """Returns at once."""

    @override
    def seconds_since(self, earlier: Moment) -> float:
        assert isinstance(earlier, HostMoment)
        return self._time - earlier._time


class HostRuntime(Runtime):
    """The host in place of a GPU."""

    def __init__(self, multiprocessors: int = 1) -> None:
        self.device = torch.device("cpu")
        self.multiprocessors = multiprocessors

    @override
    def pinned(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    @override
    def mark(self) -> Moment:
        return HostMoment()

    @override
    def copy_out(self, source: Tensor, target: Tensor) -> Moment:
        target.copy_(source)
        return HostMoment()

    @override
    def capture(self, works: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        for work in works:
            work()
        return list(works)
