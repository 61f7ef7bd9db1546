"""Measures how fast the CPU reads packed weights: the products of a decode step of one sequence, against a plain read.

The weights have the shapes of Llama 3.2 1B and random values; attention and all else of a step are left out. Products
and the read, PyTorch's maximum over as many bytes, take turns on the same threads, so that noise reaches both.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch

from pagewire.bench._output import add_output, markdown, write
from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.packed import Packed
from pagewire.services.executor.models.quantized.rounding import round_weights

LAYER = ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192))
"""Outputs and inputs of a layer's products: q, k and v; o; gate and up; down."""
LAYERS = 16
VOCABULARY = (128256, 2048)
SCHEMES: Mapping[str, int | None] = {"bf16": None, "int8": 8, "int4": 4}
"""Bits of the weights; those of the vocabulary have 8 in `int4` too."""


@dataclass
class Run:
    """What was measured with one scheme."""

    scheme: str
    nbytes: int
    """Of all weights."""
    product_s: list[float] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)

    @property
    def shares(self) -> list[float]:
        """Bandwidth of the products relative to that of the read beside it, per turn."""
        return [read / product for read, product in zip(self.read_s, self.product_s, strict=True)]


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = argparse.ArgumentParser(prog="pagewire bench bandwidth", description=__doc__)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=SCHEMES, help="kinds of weights")
    parser.add_argument("--turns", type=int, default=7, help="how often each is measured")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of products and read")
    add_output(parser)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    kernels = CpuKernels(build.load(), given.threads)
    runs = [measure(kernels, scheme, given.layers, given.turns) for scheme in given.schemes]
    print("\n".join(table(runs)))
    write(given.output, "bandwidth", arguments, threads=given.threads, runs=[asdict(run) for run in runs])
    return 0


def measure(kernels: CpuKernels, scheme: str, layers: int, turns: int) -> Run:
    """Measures one scheme."""
    products = _matrices(kernels, SCHEMES[scheme], layers)
    inputs = {matrix.inputs: torch.randn(1, matrix.inputs) for matrix in products}
    run = Run(scheme, sum(matrix.nbytes for matrix in products))
    read = torch.ones(run.nbytes // 4)

    def multiply() -> None:
        for matrix in products:
            kernels.linear(inputs[matrix.inputs], matrix)

    for function in (multiply, read.max):
        function()
    for _ in range(turns):
        run.product_s.append(_seconds(multiply))
        run.read_s.append(_seconds(read.max))
    return run


def table(runs: Sequence[Run]) -> list[str]:
    """Returns a line per scheme: size, and bytes per second of both."""
    rows = []
    for run in runs:
        product, read = (run.nbytes / statistics.median(times) / 1e9 for times in (run.product_s, run.read_s))
        share = statistics.median(run.shares)
        rows.append(f"{run.scheme} | {run.nbytes / 1e9:.2f} | {product:.1f} | {read:.1f} | {share:.0%}")
    return markdown("weights | GB | products GB/s | read GB/s | products by read", rows)


def _matrices(kernels: CpuKernels, bits: int | None, layers: int) -> list[Packed]:
    """Returns the matrices of a step, each with memory of its own."""
    found = [matrix for shape in LAYER for matrix in _packed(kernels, shape, bits, layers)]
    return [*found, *_packed(kernels, VOCABULARY, bits and 8, 1)]


def _packed(kernels: CpuKernels, shape: tuple[int, int], bits: int | None, copies: int) -> list[Packed]:
    weight = torch.randn(shape)
    if bits is None:
        return [kernels.pack(weight.bfloat16()) for _ in range(copies)]
    found = round_weights(weight, bits)
    fields = (found.codes, found.bits, found.scales, found.zero, found.minima)
    return [kernels.pack_integers(*fields) for _ in range(copies)]


def _seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began
