"""`python -m tests.kernels.triton.ahead.compile --arch sm_80 gfx942`: compiles every kernel on a machine without a GPU.

Prints registers, spills and shared memory of each configuration, or writes them as JSON. Fails if attention or sampling
spills, or if a kernel needs more shared memory than the GPU has.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.triton.ahead.configuration import Configuration
from tests.kernels.triton.ahead.cubin import amd_resources, machine_code
from tests.kernels.triton.ahead.gpus import GPUS, SHARED_MEMORY, WARP, Gpu, name_of, part_of

MODULES = (
    "sampling.edit_logits",
    "sampling.sampler",
    "step.step_inputs",
    "step.bookkeeping",
    "attention.paged_attention",
    "attention.decode_attention",
    "attention.plan_splits",
    "attention.rotary_cache",
    "layers.rms_norm",
    "layers.gated",
    "layers.moe_routing",
    "layers.grouped_linear",
    "layers.integer_linear",
    "layers.round_rows",
    "layers.eight_bit_linear",
    "layers.low_rank",
    "step.scatter",
    "attention.page_indices",
)


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources of one compiled form."""

    form: str
    """Module and name of the configuration."""
    arch: Gpu
    """The GPU: compute capability times ten, or AMD's name."""
    registers: int
    """Registers per thread."""
    spills: int
    """Number of instructions that store or load spilled registers."""
    shared: int
    """Shared memory per block in bytes."""
    warps: int
    """Warps per block."""
    fits: bool
    """Whether it spills only where it may, as on AMD's GPUs, which are untried, and the shared memory is there."""


def compiled(configuration: Configuration, arch: Gpu) -> Any:
    """Returns Triton's kernel for a GPU, whose `asm` has all forms of the code.

    Pointers are assumed aligned to 16 bytes, as those of the devices are.

    Raises:
        triton.TritonError: the kernel does not compile.
    """
    configuration = configuration.on(arch)
    kernel: Any = configuration.kernel
    signature = {}
    for parameter in kernel.params:
        if parameter.name in configuration.constants:
            signature[parameter.name] = "constexpr"
        elif parameter.name in configuration.tensors:
            signature[parameter.name] = "*" + configuration.tensors[parameter.name]
        else:
            signature[parameter.name] = parameter.annotation_type
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(kernel, signature, dict(configuration.constants), aligned)
    target = GPUTarget("hip", arch, WARP[arch]) if isinstance(arch, str) else GPUTarget("cuda", arch, 32)
    return triton.compile(source, target=target, options=dict(configuration.options))


def configurations() -> list[tuple[str, Configuration]]:
    """Returns every configuration with the name of its module."""
    return [
        (name, configuration)
        for name in MODULES
        for configuration in importlib.import_module(f"tests.kernels.triton.ahead.{name}").configurations()
    ]


def usage(index: int, arch: Gpu) -> Usage:
    """Compiles entry `index` of `configurations()`, whose entries cannot be pickled for another process."""
    module, configuration = configurations()[index]
    kernel = compiled(configuration, arch)
    registers, spills = (
        amd_resources(kernel.asm["amdgcn"]) if isinstance(arch, str) else machine_code(kernel.asm["cubin"])
    )
    shared: int = kernel.metadata.shared
    may_spill = configuration.spills or isinstance(arch, str)
    fits = shared <= SHARED_MEMORY[arch] and (spills == 0 or may_spill)
    warps = configuration.options.get("num_warps", 4)
    return Usage(f"{module}: {configuration.name}", arch, registers, spills, shared, warps, fits)


def usages(archs: list[Gpu], modules: list[str]) -> Iterator[Usage]:
    """Compiles every form of `modules` for each of `archs`, on all cores."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        pending = [
            pool.submit(usage, index, arch)
            for arch in archs
            for index, (module, configuration) in enumerate(configurations())
            if module in modules and part_of(arch) in configuration.parts
        ]
        for compiling in pending:
            yield compiling.result()


def main(arguments: list[str]) -> int:
    """Compiles the kernels, prints the table and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.triton.ahead.compile", description=__doc__)
    parser.add_argument("--arch", nargs="+", default=["sm_90"], choices=list(GPUS))
    parser.add_argument("--kernel", nargs="+", default=MODULES, choices=MODULES, help="only these")
    parser.add_argument("--output", type=Path, help="JSON file for the table")
    chosen = parser.parse_args(arguments)
    print(f"Triton {triton.__version__:<48}{'arch':>8}{'registers':>10}{'spills':>8}{'shared':>8}{'warps':>7}")
    forms = []
    for form in usages([GPUS[name] for name in chosen.arch], chosen.kernel):
        forms.append(form)
        print(
            f"{form.form:<55}{name_of(form.arch):>8}{form.registers:>10}{form.spills:>8}{form.shared:>8}{form.warps:>7}"
            f"{'' if form.fits else '  FAILED'}",
            flush=True,
        )
    if chosen.output:
        chosen.output.write_text(json.dumps({"triton": triton.__version__, "forms": [asdict(form) for form in forms]}))
    return int(not all(form.fits for form in forms))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
