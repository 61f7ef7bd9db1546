"""Measures how fast the CPU reads packed weights: the products of a decode step of one sequence, against a plain read.

The weights have the shapes of Llama 3.2 1B and random values; attention and all else of a step are left out. Products
and the read, PyTorch's maximum over as many bytes, take turns on the same threads, so that noise reaches both.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch

from pagewire.bench._common.output import add_output, markdown, write
from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.kernels.cpu.packed import Packed
from pagewire.kernels.scales import Multiples
from pagewire.services.executor.devices.cpu.weight_packing import VOCABULARY_BITS
from pagewire.services.executor.models.quantized.layouts import IntegerWeights
from pagewire.services.executor.models.quantized.rounding import round_weights
from pagewire.shared.settings.flags import Parser

LAYER = ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192))
"""Outputs and inputs of a layer's products: q, k and v; o; gate and up; down."""
LAYERS = 16
VOCABULARY = (128256, 2048)
SCHEMES: Mapping[str, tuple[str, str]] = {
    "bf16": ("bf16", "bf16"),
    "int8": ("int8", "int8"),
    "int4": ("int4", f"int{VOCABULARY_BITS}"),
    "q4_k": ("q4_k", "q6_k"),
    "q5_k": ("q5_k", "q6_k"),
    "q6_k": ("q6_k", "q6_k"),
}
"""Storage of the matrices of the layers, and of the vocabulary."""
K_QUANTS: Mapping[str, tuple[int, int, bool]] = {"q4_k": (4, 32, True), "q5_k": (5, 32, True), "q6_k": (6, 16, False)}
"""Bits, inputs of a group, and whether there are minima. 256 inputs share a step."""


@dataclass
class Run:
    """Figures of one scheme."""

    scheme: str
    nbytes: int
    """Bytes of all weights."""
    product_s: list[float] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)

    @property
    def shares(self) -> list[float]:
        """Bandwidth of the products relative to that of the read beside it, per turn."""
        return [read / product for read, product in zip(self.read_s, self.product_s, strict=True)]


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = Parser(prog="pagewire bench bandwidth", description=__doc__)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=SCHEMES, help="kinds of weights")
    parser.add_argument("--turns", type=int, default=7, help="how often each is measured")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of products and read")
    add_output(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    kernels = CpuKernels(build.load(), options.threads)
    runs = [measure(kernels, scheme, options.layers, options.turns) for scheme in options.schemes]
    print("\n".join(table(runs)))
    write(options.output, parser.prog, arguments, threads=options.threads, runs=[asdict(run) for run in runs])
    return 0


def measure(kernels: CpuKernels, scheme: str, layers: int, turns: int) -> Run:
    """Measures one scheme."""
    products = _matrices(kernels, *SCHEMES[scheme], layers)
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
    """Returns a line per scheme: size, time of the products, and bytes per second of both."""
    rows = []
    for run in runs:
        product, read = (statistics.median(times) for times in (run.product_s, run.read_s))
        share = statistics.median(run.shares)
        size = run.nbytes / 1e9
        rows.append(
            f"{run.scheme} | {size:.2f} | {1e3 * product:.1f} | {size / product:.1f} | {size / read:.1f} | {share:.0%}"
        )
    return markdown("weights | GB | products ms | products GB/s | read GB/s | products by read", rows)


def _matrices(kernels: CpuKernels, stored: str, vocabulary: str, layers: int) -> list[Packed]:
    """Returns the matrices of a step, each with memory of its own."""
    matrices = [matrix for shape in LAYER for matrix in _packed(kernels, shape, stored, layers)]
    return [*matrices, *_packed(kernels, VOCABULARY, vocabulary, 1)]


def _packed(kernels: CpuKernels, shape: tuple[int, int], stored: str, copies: int) -> list[Packed]:
    if stored == "bf16":
        weight = torch.randn(shape, dtype=torch.bfloat16)
        return [kernels.pack(weight) for _ in range(copies)]
    if stored in K_QUANTS:
        matrices = _k_quant(shape, *K_QUANTS[stored])
    else:
        matrices = round_weights(torch.randn(shape), int(stored.removeprefix("int")))
    fields = (matrices.codes, matrices.bits, matrices.scales, matrices.zero, matrices.minima)
    return [kernels.pack_integers(*fields) for _ in range(copies)]


def _k_quant(shape: tuple[int, int], bits: int, group: int, has_minima: bool) -> IntegerWeights:
    """Returns random weights, all of them finite."""
    outputs, inputs = shape

    def multiples() -> Multiples:
        factors = torch.randint(64, (outputs, inputs // group), dtype=torch.int8)
        return Multiples(factors, torch.rand(outputs, inputs // 256).half())

    codes = torch.randint(1 << bits, shape, dtype=torch.uint8)
    return IntegerWeights(codes, bits, multiples(), 0, multiples() if has_minima else None)


def _seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began
