"""Sums over the ranks of a model: processes of one machine that each compute a part of it and share memory."""

import ctypes
import mmap
from collections.abc import Sequence
from ctypes import byref, c_int, c_int64, c_uint32, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagewire.kernels.cpu.kernels import CpuKernels, Int64, address
from pagewire.shared.errors import DeviceLost

BUFFER = 1 << 18
"""Numbers that an exchange of all ranks moves at once: a buffer of 1 MiB stays in the level 2 cache."""


class RanksAborted(DeviceLost):
    """A rank is lost, so that the others cannot go on."""

    def __init__(self) -> None:
        super().__init__("another rank is lost")


class Ranks(ctypes.Structure):
    """The struct `Ranks` of `collectives.hpp`."""

    _fields_ = (
        ("segment", c_void_p),
        ("buffers", c_void_p),
        *((name, c_int64) for name in ("length", "rank", "size")),
        *((name, c_uint32) for name in ("exchanges", "calls")),
    )


class SharedMemoryCollectives:
    """One rank's view of all ranks. All methods but `abort` and `aborted` are called on one thread.

    Attributes:
        rank: number of this rank.
        size: number of ranks.
        pointers: the struct that the kernels read. This object must outlive it.
    """

    def __init__(self, kernels: CpuKernels, memory: mmap.mmap, rank: int, size: int) -> None:
        """`memory`, of `memory_bytes` and zeros at first, is shared by all ranks."""
        self.rank, self.size = rank, size
        self._kernels = kernels
        self._memory = np.frombuffer(memory, np.uint8)  # keeps alive what the struct points to
        first = address(self._memory)
        self.pointers = Ranks(first, first + segment_bytes(kernels), BUFFER, rank, size, 0, 0)
        self._all_reduce = kernels.function("all_reduce", [c_void_p, c_void_p, c_int64, c_int])
        self._all_gather = kernels.function("all_gather", [*[c_void_p] * 3, c_int64, c_void_p, c_int])
        self._begin_call = kernels.function("begin_call", [c_void_p])
        self._await_call = _integer_function(kernels, "await_call")
        self._end_call = kernels.function("end_call", [c_void_p])
        self._await_others = _integer_function(kernels, "await_others")
        self._abort = kernels.function("abort_ranks", [c_void_p])
        self._aborted = _integer_function(kernels, "aborted")

    @property
    def aborted(self) -> bool:
        """Whether a rank is lost."""
        return bool(self._aborted(byref(self.pointers)))

    def abort(self) -> None:
        """Ends all waits of all ranks, now and later. Any thread may call it."""
        self._abort(byref(self.pointers))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' `x`, of any shape and floating dtype, in its place.

        It is added in float32, in the order of the ranks, so that all ranks get the same bits.

        Raises:
            RanksAborted: a rank is lost.
        """
        numbers = x.float().contiguous()
        self._all_reduce(byref(self.pointers), numbers.data_ptr(), numbers.numel(), self._kernels.threads)
        self.check()
        return x if numbers is x else x.copy_(numbers)

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """Returns [R, sum of sizes], the columns of all ranks in their order, of which `part` [R, width] is one's own.

        Both are float32. `sizes` are the numbers of columns of all ranks.

        Raises:
            RanksAborted: a rank is lost.
        """
        part, out = part.contiguous(), torch.empty(len(part), sum(sizes))
        columns = np.array(sizes, np.int64)
        pointers = byref(self.pointers), part.data_ptr(), address(columns)
        self._all_gather(*pointers, len(part), out.data_ptr(), self._kernels.threads)
        self.check()
        return out

    def first_of_largest(self, values: Tensor, ids: Int64) -> Int64:
        """Returns the id [R] of the largest value of all ranks in each row, the lowest rank's of equal ones.

        `values` float32 and `ids` below 2^31 are [R]. A negative id of any rank, such as `NOT_FINITE`, is the result.
        """
        part = torch.empty(len(ids), 2)
        part[:, 0] = values
        part[:, 1].view(torch.int32).copy_(torch.from_numpy(ids))
        every = self.all_gather(part, [2] * self.size)
        numbers = every[:, 1::2].contiguous().view(torch.int32).numpy().astype(np.int64)
        best = numbers[np.arange(len(ids)), every[:, ::2].numpy().argmax(axis=1)]
        result: Int64 = np.where(numbers.min(axis=1) < 0, numbers.min(axis=1), best)
        return result

    def begin_call(self) -> None:
        """Lets the other ranks return from `await_call`. Only rank 0 calls it."""
        self._begin_call(byref(self.pointers))

    def await_call(self) -> None:
        """Waits until rank 0 begins its next call.

        Raises:
            RanksAborted: a rank is lost.
        """
        if not self._await_call(byref(self.pointers)):
            raise RanksAborted

    def end_call(self) -> None:
        """Says that this rank has ended the call."""
        self._end_call(byref(self.pointers))

    def await_others(self) -> None:
        """Waits until all other ranks have ended the calls of this rank, which is 0.

        Raises:
            RanksAborted: a rank is lost.
        """
        if not self._await_others(byref(self.pointers)):
            raise RanksAborted

    def check(self) -> None:
        """Raises RanksAborted if a rank is lost."""
        if self.aborted:
            raise RanksAborted


def memory_bytes(kernels: CpuKernels, size: int) -> int:
    """Returns the bytes of the memory that `size` ranks share, a multiple of the size of a page."""
    used = segment_bytes(kernels) + 2 * size * BUFFER * torch.float32.itemsize
    return -(-used // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def segment_bytes(kernels: CpuKernels) -> int:
    """Returns the bytes of the stamps at the beginning of the shared memory."""
    return int(_integer_function(kernels, "segment_bytes", [])())


def _integer_function(kernels: CpuKernels, name: str, arguments: Sequence[Any] = (c_void_p,)) -> Any:
    """Returns a function of the library whose result is an integer."""
    function: Any = kernels.function(name, list(arguments))
    function.restype = c_int64
    return function
