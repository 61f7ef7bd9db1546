"""GELU, by the error function or by tanh, alone or times a second half (GeGLU). Source: Hendrycks and Gimpel, 2016."""

import torch
import triton
import triton.language as tl

from pagewire.kernels.jit import Configuration, jit

BLOCK = 1024


@jit
def gelu_kernel(
    out: tl.tensor, x: tl.tensor, SIZE: tl.constexpr, GATED: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """One program: BLOCK features of one token."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    WIDTH: tl.constexpr = 2 * SIZE if GATED else SIZE
    gate = tl.load(x + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    if TANH:
        # x * (1 + tanh(z)) / 2 is x * sigmoid(2z), which does not overflow
        result = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        result = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    if GATED:
        result *= tl.load(x + row * WIDTH + SIZE + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, result.to(out.dtype.element_ty), mask=mask)


def gelu(x: torch.Tensor, out: torch.Tensor, *, tanh: bool) -> None:
    """`out` [T, size] = gelu(x), of the same dtype, contiguous.

    With `x` [T, 2 * size], gelu(x[:, :size]) * x[:, size:]. `tanh` takes the approximation by tanh.
    """
    size = out.shape[1]
    gelu_kernel[len(x), triton.cdiv(size, BLOCK)](
        out, x, SIZE=size, GATED=x.shape[1] == 2 * size, TANH=tanh, BLOCK=BLOCK
    )


def reference(x: torch.Tensor, size: int, *, tanh: bool) -> torch.Tensor:
    """`gelu` in float64."""
    result = torch.nn.functional.gelu(x[:, :size].double(), approximate="tanh" if tanh else "none")
    return result * x[:, size:].double() if x.shape[1] == 2 * size else result


def configurations() -> list[Configuration]:
    """Forms that a device launches, for `pagewire.kernels.compile`."""
    return [
        Configuration(
            f"{size}{' gated' if gated else ''}{' tanh' if tanh else ''} {dtype}",
            gelu_kernel,
            {"out": dtype, "x": dtype},
            {"SIZE": size, "GATED": gated, "TANH": tanh, "BLOCK": BLOCK},
        )
        for size, gated, tanh, dtype in (
            (3072, False, False, "bf16"),
            (10240, False, True, "bf16"),
            (9216, True, True, "bf16"),
            (3072, False, False, "fp32"),
        )
    ]
