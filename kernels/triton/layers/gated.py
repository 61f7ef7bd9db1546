"""The activation of gates times the other half, as in a SwiGLU layer. Source: Shazeer, 2020."""

import torch
import triton
import triton.language as tl

from pagewire.kernels.activation import Activation
from pagewire.kernels.triton.dependent_launch import launch_options, wait_for_previous
from pagewire.kernels.triton.jit import jit

BLOCK = 1024


@jit
def gated_kernel(
    out: tl.tensor,
    x: tl.tensor,
    rows: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: BLOCK features of one token. ACTIVATION is a number of `Activation`."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if rows is not None:
        row = tl.load(rows + row).to(tl.int64)
        if row < 0:
            return
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
        gate = tl.where(gate < 0.0, 0.0, gate)  # NaN stays
    tl.store(out + row * SIZE + column, (gate * up).to(out.dtype.element_ty), mask=mask)


def gated(x: torch.Tensor, out: torch.Tensor, kind: Activation, rows: torch.Tensor | None = None) -> None:
    """Writes the activation of x[:, :size] times x[:, size:] to `out` [T, size].

    `x` [T, 2 * size] is contiguous, of the same dtype. `rows` int32 [T] are the rows that are computed, each once; -1
    stands for none. By default all are.
    """
    size = out.shape[1]
    sizes = {"SIZE": size, "BLOCK": BLOCK, "ACTIVATION": int(kind)}
    gated_kernel[len(x), triton.cdiv(size, BLOCK)](out, x, rows, **sizes, **launch_options())
