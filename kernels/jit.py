"""`triton.jit` with a type, and what ahead-of-time compilation must be told of a kernel."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import triton
import triton.language as tl


class Kernel(Protocol):
    """A Triton function: `kernel[grid](...)` launches it, other kernels call it."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        ...


def jit(function: Callable[..., Any]) -> Kernel:
    """`triton.jit`. Parameters annotated `tl.int32` do not specialise the code on their value.

    A step must never wait for a compilation because a batch has one row or a multiple of sixteen.
    """
    parameters = inspect.signature(function).parameters.values()
    scalars = [parameter.name for parameter in parameters if parameter.annotation is tl.int32]
    return cast("Kernel", triton.jit(do_not_specialize=scalars)(function))


@dataclass(frozen=True, slots=True)
class Configuration:
    """One compiled form of a kernel: what a device with that shape of model launches."""

    name: str
    """Says what the form is for, in the table of `pagewire.kernels.compile`."""
    kernel: Kernel
    """The Triton function."""
    tensors: Mapping[str, str]
    """Element type of each tensor parameter in Triton's terms, such as bf16 or i32."""
    constants: Mapping[str, object]
    """Value of each `tl.constexpr` parameter; an absent optional tensor is the constant None."""
    options: Mapping[str, int] = field(default_factory=dict)
    """`num_warps`, `num_stages` and `maxnreg`, where they are not Triton's own."""
    spills: bool = True
    """Whether spilled registers are tolerated: no in attention and sampling."""
    minimum_arch: int = 80
    """Oldest compute capability, times ten, that has the instructions."""
