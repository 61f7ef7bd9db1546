"""`triton.jit` with types."""

import inspect
from collections.abc import Callable
from typing import Any, Protocol, cast

import triton
import triton.language as tl


class Kernel(Protocol):
    """A Triton function. `kernel[grid](...)` launches it, and other kernels can call it."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        ...


def jit(function: Callable[..., Any]) -> Kernel:
    """Applies `triton.jit`. Parameters annotated with `tl.int32` do not specialise the code on their value.

    Otherwise a step would wait for a compilation when a batch first has one row or a multiple of sixteen.
    """
    parameters = inspect.signature(function).parameters.values()
    scalars = [parameter.name for parameter in parameters if parameter.annotation is tl.int32]
    return cast("Kernel", triton.jit(do_not_specialize=scalars)(function))
