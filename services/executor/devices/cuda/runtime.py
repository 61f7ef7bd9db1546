"""The parts of CUDA that a step needs beside tensors: pinned memory, events, a second stream, graphs."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

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


class CudaMoment(Moment):
    """A CUDA event."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    @override
    def wait(self) -> None:
        self.event.synchronize()

    @override
    def seconds_since(self, earlier: Moment) -> float:
        """Returns a float32, as CUDA does: exact enough between the two ends of a step, not since the start."""
        assert isinstance(earlier, CudaMoment)
        return float(earlier.event.elapsed_time(self.event)) / 1000


class CudaRuntime(Runtime):
    """The runtime of a GPU. Computing is enqueued on the current stream."""

    def __init__(self, number: int = 0) -> None:
        """`number` is that of the GPU among the visible ones, which becomes the current one."""
        torch.set_float32_matmul_precision("highest")  # an environment variable may have turned TF32 on
        torch.cuda.set_device(number)
        self.device = torch.device("cuda", number)
        self.multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._outward = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._capturing = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @override
    def pinned(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, pin_memory=True)

    @override
    def mark(self) -> Moment:
        return CudaMoment(torch.cuda.current_stream())

    @override
    def copy_out(self, source: Tensor, target: Tensor) -> Moment:
        self._outward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._outward):
            target.copy_(source, non_blocking=True)
        return CudaMoment(self._outward)

    @override
    def capture(self, works: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        pool = torch.cuda.graph_pool_handle()  # a new one: a pool whose graphs are gone cannot be used again
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
