"""SiLU of the gate times the other half, the activation of a SwiGLU layer. Source: Shazeer, 2020."""

import torch
import triton
import triton.language as tl

from pagewire.kernels.jit import Configuration, jit

BLOCK = 1024


@jit
def silu_mul_kernel(out: tl.tensor, x: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """One program: BLOCK features of one token."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    gate = tl.load(x + row * (2 * SIZE) + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * SIZE) + SIZE + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)


def silu_mul(x: torch.Tensor, out: torch.Tensor) -> None:
    """Writes silu(x[:, :size]) * x[:, size:] to `out` [T, size]; `x` [T, 2 * size] is contiguous, of the same dtype."""
    size = out.shape[1]
    silu_mul_kernel[len(x), triton.cdiv(size, BLOCK)](out, x, SIZE=size, BLOCK=BLOCK)


def reference(x: torch.Tensor) -> torch.Tensor:
    """Returns `silu_mul` in float64."""
    gate, up = x.double().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def configurations() -> list[Configuration]:
    """Returns the variants that devices launch, for `pagewire.kernels.compile`."""
    return [
        Configuration(f"{size} {dtype}", silu_mul_kernel, {"out": dtype, "x": dtype}, {"SIZE": size, "BLOCK": BLOCK})
        for size, dtype in ((3072, "bf16"), (14336, "bf16"), (17408, "bf16"), (14336, "fp32"))
    ]
