"""The activation of gates times the other half, as in a SwiGLU layer. Source: Shazeer, 2020."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pagewire.kernels.activation import Activation
from pagewire.kernels.triton.dependent_launch import launch_options, wait_for_previous
from pagewire.kernels.triton.jit import Configuration, jit

BLOCK = 1024


@jit
def gated_kernel(
    out: tl.tensor,
    x: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: BLOCK features of one token. ACTIVATION is a number of `Activation`."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    gate = tl.load(x + row * (2 * SIZE) + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * SIZE) + SIZE + column, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        gate *= tl.sigmoid(gate)
    elif ACTIVATION == 1:
        gate *= 0.5 + 0.5 * tl.erf(gate * 0.70710678)
    elif ACTIVATION == 2:
        gate *= tl.sigmoid(1.5957691216 * gate * (1.0 + 0.044715 * gate * gate))
    else:
        gate = tl.maximum(gate, 0.0)
    tl.store(out + row * SIZE + column, (gate * up).to(out.dtype.element_ty), mask=mask)


def gated(x: torch.Tensor, out: torch.Tensor, kind: Activation) -> None:
    """Writes the activation of x[:, :size] times x[:, size:] to `out` [T, size].

    `x` [T, 2 * size] is contiguous, of the same dtype.
    """
    size = out.shape[1]
    sizes = {"SIZE": size, "BLOCK": BLOCK, "ACTIVATION": int(kind)}
    gated_kernel[len(x), triton.cdiv(size, BLOCK)](out, x, **sizes, **launch_options())


def reference(x: torch.Tensor, kind: Activation) -> torch.Tensor:
    """Returns `gated` in float64."""
    gate, up = x.double().chunk(2, -1)
    match kind:
        case Activation.SILU:
            return F.silu(gate) * up
        case Activation.GELU:
            return F.gelu(gate) * up
        case Activation.GELU_TANH:
            return F.gelu(gate, approximate="tanh") * up
        case Activation.RELU:
            return F.relu(gate) * up


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch, for `pagewire.kernels.triton.compile`."""
    variants = [(size, "bf16", Activation.SILU) for size in (768, 1408, 3072, 5632, 14336, 17408)]
    variants += [
        (14336, "fp32", Activation.SILU),
        (9216, "bf16", Activation.GELU_TANH),
        (9216, "bf16", Activation.GELU),
    ]
    return [
        Configuration(
            f"{size} {dtype} {kind.name.lower()}",
            gated_kernel,
            {"out": dtype, "x": dtype},
            {"SIZE": size, "BLOCK": BLOCK, "ACTIVATION": int(kind)},
        )
        for size, dtype, kind in variants
    ]
