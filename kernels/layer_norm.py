"""Layer norm, with the residual's addition in the same pass. Source: Ba, Kiros and Hinton, 2016."""

import torch
import triton
import triton.language as tl

from pagewire.kernels.jit import Configuration, jit
from pagewire.kernels.rms_norm import warps


@jit
def layer_norm_kernel(
    out: tl.tensor,
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    epsilon: tl.float32,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """One program: one token. The variance is taken around the mean, in a second pass over registers."""
    place = tl.program_id(0).to(tl.int64) * SIZE
    dims = tl.arange(0, PADDED)
    mask = dims < SIZE
    hidden = tl.load(x + place + dims, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        hidden += tl.load(residual + place + dims, mask=mask, other=0.0).to(tl.float32)
        tl.store(residual + place + dims, hidden.to(residual.dtype.element_ty), mask=mask)
        hidden = hidden.to(residual.dtype.element_ty).to(tl.float32)
    centred = tl.where(mask, hidden - tl.sum(hidden, 0) / SIZE, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / SIZE + epsilon)
    gain = tl.load(weight + dims, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(bias + dims, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place + dims, (centred * scale * gain + shift).to(out.dtype.element_ty), mask=mask)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    epsilon: float,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> None:
    """`out` = norm(x + residual) * weight + bias; `residual` becomes x + residual.

    `x`, `out` and `residual` are [T, size] of one dtype, contiguous, `weight` and `bias` [size]; `out` may be `x`.
    """
    size = x.shape[1]
    padded = triton.next_power_of_2(size)
    layer_norm_kernel[(len(x),)](
        out, x, residual, weight, bias, epsilon, SIZE=size, PADDED=padded, num_warps=warps(padded)
    )


def reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` and the new residual of `layer_norm`, in float64."""
    hidden = x.double() if residual is None else (x.double() + residual.double()).to(x.dtype).double()
    normal = torch.nn.functional.layer_norm(hidden, hidden.shape[1:], weight.double(), bias.double(), epsilon)
    return normal, hidden


def configurations() -> list[Configuration]:
    """Forms that a device launches, for `pagewire.kernels.compile`."""
    found = []
    for size, dtype in ((768, "bf16"), (2560, "bf16"), (4096, "bf16"), (768, "fp32")):
        padded = triton.next_power_of_2(size)
        for fused in (False, True):
            tensors = dict.fromkeys(("out", "x", "weight", "bias", *(("residual",) if fused else ())), dtype)
            constants = {"SIZE": size, "PADDED": padded, **({} if fused else {"residual": None})}
            name = f"{size} {dtype}{' residual' if fused else ''}"
            found.append(Configuration(name, layer_norm_kernel, tensors, constants, {"num_warps": warps(padded)}))
    return found
