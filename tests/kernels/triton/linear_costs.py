"""`python -m tests.kernels.triton.linear_costs`: products of Llama-3-8B's layers with quantized weights, on an H200.

Prints for each format and number of rows the bytes that are moved, the instructions of the loop per code, the programs
per multiprocessor, and a predicted time: the longest of the time to move the bytes at the measured copy bandwidth, to
issue the instructions and to multiply at the measured rate, and a launch. Everything comes from the machine code and
from bench/results/gpu-h200.json; nothing is run. A process of its own, since the interpreter compiles nothing.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagewire.bench._common.output import markdown
from tests.kernels.triton.ahead.compile import compiled
from tests.kernels.triton.ahead.configuration import Configuration
from tests.kernels.triton.ahead.cubin import machine_code
from tests.kernels.triton.ahead.gpus import SHARED_MEMORY
from tests.kernels.triton.ahead.layers import eight_bit_linear, integer_linear
from tests.kernels.triton.sass import product_loops

ARCH = 90
RESULTS = Path(__file__).parents[3] / "bench" / "results" / "gpu-h200.json"
LAYERS = {"gate and up": (28672, 4096), "down": (4096, 14336)}
"""Outputs and inputs of the products."""
ROWS = (1, 8, 32, 64, 512)
MULTIPROCESSORS = 132
REGISTERS = 65_536
"""Registers of a multiprocessor."""
MOST_PROGRAMS = 32
"""Programs that a multiprocessor runs at once, at most."""
MOST_THREADS = 2048
WARP = 32
ISSUED = 4 * 1.83e9
"""Instructions of warps that a multiprocessor issues per second."""
LAUNCH = 2e-6
"""Seconds that a launch costs in a graph, as measured on an H200."""


@dataclass(frozen=True, slots=True)
class Product:
    """One product in one format, with the resources of its compiled kernel."""

    format: str
    layer: str
    rows: int
    moved: int
    """Bytes of weights, scales, inputs and outputs."""
    per_code: float
    """Instructions of threads in the loop per code of a weight."""
    programs: int
    resident: int
    """Programs that fit into a multiprocessor at once."""
    issued: float
    """Instructions of warps in the loops of all programs."""
    flops: float

    def seconds(self, bandwidth: float, flops: float) -> float:
        """Returns the predicted time, for a copy bandwidth in bytes and a rate of products in operations per second."""
        busy = min(MULTIPROCESSORS, self.programs)
        return LAUNCH + max(self.moved / bandwidth, self.issued / (ISSUED * busy), self.flops / flops)


def products(formats: Sequence[str], rows: Sequence[int]) -> Iterator[Product]:
    """Compiles and yields the products."""
    for name in formats:
        for layer, (outputs, inputs) in LAYERS.items():
            for count in rows:
                yield _product(name, layer, count, outputs, inputs)


def _product(name: str, layer: str, rows: int, outputs: int, inputs: int) -> Product:
    form, bits, group = FORMATS[name](rows, outputs, inputs)
    kernel = compiled(form, ARCH)
    constants = {key: value for key, value in form.constants.items() if isinstance(value, int)}
    block_m, block_n, splits = (constants[key] for key in ("BLOCK_M", "BLOCK_N", "SPLITS"))
    threads = WARP * form.options["num_warps"]
    codes = block_n * constants["TILE"] * constants.get("PER_WORD", 1)
    loop = max(map(len, product_loops(kernel.asm["cubin"])))
    programs = math.ceil(rows / block_m) * math.ceil(outputs / block_n) * splits
    passes = inputs // splits * block_n // codes
    registers, shared = machine_code(kernel.asm["cubin"]).registers, kernel.metadata.shared
    resident = min(
        MOST_PROGRAMS,
        MOST_THREADS // threads,
        REGISTERS // (registers * threads),
        SHARED_MEMORY[ARCH] // shared if shared else MOST_PROGRAMS,
    )
    scales, element = 4 * outputs * (inputs // group), 2 if form.tensors["x"] == "bf16" else 1
    return Product(
        format=name,
        layer=layer,
        rows=rows,
        moved=outputs * inputs * bits // 8 + scales + rows * (inputs * element + 2 * outputs),
        per_code=loop * threads / codes,
        programs=programs,
        resident=resident,
        issued=float(programs * passes * loop * form.options["num_warps"]),
        flops=2.0 * rows * outputs * inputs,
    )


def _integers(number: int, rows: int, outputs: int, inputs: int) -> tuple[Configuration, int, int]:
    form = integer_linear.FORMATS[number]
    form = form._replace(group=min(form.group, inputs) if form.group < 4096 else inputs)
    return integer_linear.variant(form, rows, True, outputs=outputs, inputs=inputs), form.bits, form.group


def _eight_bits(stored: str, group: int, rows: int, outputs: int, inputs: int) -> tuple[Configuration, int, int]:
    group = group or inputs
    return eight_bit_linear.variant(stored, rows, stored, group, outputs=outputs, inputs=inputs), 8, group


FORMATS = {
    "int4, groups of 128": lambda *sizes: _integers(0, *sizes),
    "int8 per output": lambda *sizes: _integers(4, *sizes),
    "int8, int8 activations": lambda *sizes: _eight_bits("i8", 0, *sizes),
    "fp8, blocks of 128": lambda *sizes: _eight_bits("fp8e4nv", 128, *sizes),
}
"""Configuration, bits of a weight and inputs of a scale for rows, outputs and inputs, by the name of the format."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.triton.linear_costs", description=__doc__)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    options = parser.parse_args(arguments)
    measured = json.loads(RESULTS.read_text())
    rows = []
    for product in products(options.formats, options.rows):
        seconds = product.seconds(measured["copy_bytes_per_s"], measured["matrix_flops_per_s"])
        share = product.moved / seconds / measured["copy_bytes_per_s"]
        cells = (
            product.format,
            product.layer,
            product.rows,
            f"{product.moved / 1e6:.1f}",
            f"{product.per_code:.2f}",
            f"{product.programs / MULTIPROCESSORS:.1f} of {product.resident}",
            f"{seconds * 1e6:.1f}",
            f"{share:.0%}",
        )
        rows.append(" | ".join(map(str, cells)))
        print(rows[-1], file=sys.stderr, flush=True)
    heads = ("weights", "layer", "rows", "MB moved", "instructions per code", "programs per multiprocessor")
    print("\n".join(markdown(" | ".join([*heads, "predicted us", "of the copy bandwidth"]), rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
