"""`triton.jit` with types, and the description of a kernel for ahead-of-time compilation."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import triton
import triton.language as tl

from pagewire.kernels.gpu_arch import PARTS, has_dependent_launch


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


@dataclass(frozen=True, slots=True)
class Configuration:
    """A compiled variant of a kernel, as launched for models of a certain shape."""

    name: str
    """Purpose of the variant, shown in the table of `pagewire.kernels.triton.compile`."""
    kernel: Kernel
    """The Triton function."""
    tensors: Mapping[str, str]
    """Element type of each tensor parameter by Triton's names, such as bf16 or i32."""
    constants: Mapping[str, object]
    """Value of each `tl.constexpr` parameter; an absent optional tensor is the constant None."""
    options: Mapping[str, int] = field(default_factory=dict)
    """`num_warps`, `num_stages` and `maxnreg`, where they differ from Triton's defaults."""
    spills: bool = True
    """Whether spilled registers are allowed; false for attention and sampling."""
    parts: tuple[int, ...] = PARTS
    """Those of `PARTS` on which devices launch it."""

    def on(self, arch: int) -> "Configuration":
        """Returns the variant as a GPU launches it: see `pagewire.kernels.triton.dependent_launch`."""
        kernel: Any = self.kernel
        if "PDL" not in kernel.arg_names:
            return self
        pdl = has_dependent_launch(arch)
        return replace(self, constants={**self.constants, "PDL": pdl}, options={**self.options, "launch_pdl": pdl})
