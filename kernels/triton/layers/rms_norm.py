"""RMSNorm, with the addition of the residual in the same pass. Source: Zhang and Sennrich, 2019."""

import torch
import triton
import triton.language as tl

from pagewire.kernels.triton.dependent_launch import launch_options, wait_for_previous
from pagewire.kernels.triton.jit import jit


@jit
def rms_norm_kernel(
    out: tl.tensor,
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    epsilon: tl.float32,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: one token."""
    wait_for_previous(PDL)
    place = tl.program_id(0).to(tl.int64) * SIZE
    dims = tl.arange(0, PADDED)
    mask = dims < SIZE
    hidden = tl.load(x + place + dims, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        hidden += tl.load(residual + place + dims, mask=mask, other=0.0).to(tl.float32)
        tl.store(residual + place + dims, hidden.to(residual.dtype.element_ty), mask=mask)
        hidden = hidden.to(residual.dtype.element_ty).to(tl.float32)
    scale = tl.rsqrt(tl.sum(hidden * hidden, 0) / SIZE + epsilon)
    gain = tl.load(weight + dims, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place + dims, (hidden * scale * gain).to(out.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor, residual: torch.Tensor | None = None
) -> None:
    """Writes norm(x + residual) * weight to `out` and x + residual to `residual`.

    `x`, `out` and `residual` are contiguous [T, size] of one dtype, `weight` is [size]; `out` may be `x`. A model that
    multiplies by 1 + weight (Gemma) must add the 1 when its weights are loaded.
    """
    size = x.shape[1]
    padded = triton.next_power_of_2(size)
    sizes = {"SIZE": size, "PADDED": padded, "num_warps": warps(padded)}
    rms_norm_kernel[(len(x),)](out, x, residual, weight, epsilon, **sizes, **launch_options())


def warps(padded: int) -> int:
    """Returns the warps for a row of `padded` elements: eight elements per thread, for 16-byte accesses."""
    return max(1, min(16, padded // 256))
