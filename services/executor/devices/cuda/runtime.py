"""The parts of CUDA that a step needs beside tensors: pinned memory, events, a second stream, graphs.

`HostRuntime` runs the same device under Triton's interpreter, where work is done as soon as it is enqueued.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pagewire.shared.progress import shown


class Moment(Protocol):
    """A point in the order of the device's work, such as a CUDA event."""

    def wait(self) -> None:
        """Waits until all work before this point is done."""

    def seconds_since(self, earlier: "Moment") -> float:
        """Returns the time from another point of the same runtime to this one, by its clock. Only after `wait`."""


class Runtime(Protocol):
    """The runtime of one device."""

    device: torch.device
    multiprocessors: int

    def pinned(self, *shape: int) -> Tensor:
        """Returns pinned int32 host memory, which the device copies without the CPU."""

    def mark(self) -> Moment:
        """Returns the moment after all work that was enqueued for computing."""

    def copy_out(self, source: Tensor, target: Tensor) -> Moment:
        """Copies to pinned memory after the work enqueued so far, without delaying later work."""

    def capture(self, works: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        """Runs every one of `works` once and returns functions that repeat them on the same memory.

        Only one of them may run at a time: they share memory for what they need in between.
        """


class CudaMoment:
    """A `Moment` as a CUDA event."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        """See `Moment.wait`."""
        self.event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        """See `Moment.seconds_since`. CUDA gives a float32: of a step's two ends, not of times since the start."""
        assert isinstance(earlier, CudaMoment)
        return float(earlier.event.elapsed_time(self.event)) / 1000


class CudaRuntime:
    """The `Runtime` of the current GPU. Computing is enqueued on the current stream."""

    def __init__(self) -> None:
        torch.set_float32_matmul_precision("highest")  # an environment variable may have turned TF32 on
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._outward = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._capturing = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def pinned(self, *shape: int) -> Tensor:
        """See `Runtime.pinned`."""
        return torch.zeros(shape, dtype=torch.int32, pin_memory=True)

    def mark(self) -> Moment:
        """See `Runtime.mark`."""
        return CudaMoment(torch.cuda.current_stream())

    def copy_out(self, source: Tensor, target: Tensor) -> Moment:
        """See `Runtime.copy_out`."""
        self._outward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._outward):
            target.copy_(source, non_blocking=True)
        return CudaMoment(self._outward)

    def capture(self, works: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        """See `Runtime.capture`. The memory pool is new: one whose graphs are gone cannot be used again."""
        pool = torch.cuda.graph_pool_handle()
        return [self._graph(work, pool) for work in shown(works, "capturing graphs")]

    def _graph(self, work: Callable[[], None], pool: Any) -> Callable[[], None]:
        torch.cuda.synchronize()
        with torch.cuda.stream(self._capturing):
            work()  # compiles and loads kernels, and allocates the workspaces of products outside of the pool
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self._capturing):
            work()
        return graph.replay


class HostMoment:
    """A `Moment` that is already reached."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def wait(self) -> None:
        """Returns at once."""

    def seconds_since(self, earlier: Moment) -> float:
        """See `Moment.seconds_since`."""
        assert isinstance(earlier, HostMoment)
        return self._time - earlier._time


class HostRuntime:
    """A `Runtime` without a GPU."""

    def __init__(self, multiprocessors: int = 1) -> None:
        self.device = torch.device("cpu")
        self.multiprocessors = multiprocessors

    def pinned(self, *shape: int) -> Tensor:
        """See `Runtime.pinned`."""
        return torch.zeros(shape, dtype=torch.int32)

    def mark(self) -> Moment:
        """See `Runtime.mark`."""
        return HostMoment()

    def copy_out(self, source: Tensor, target: Tensor) -> Moment:
        """See `Runtime.copy_out`."""
        target.copy_(source)
        return HostMoment()

    def capture(self, works: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        """See `Runtime.capture`."""
        for work in works:
            work()
        return list(works)
