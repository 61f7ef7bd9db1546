"""`python -m pagewire.kernels.compile --arch sm_80 sm_90 sm_100`: compiles every kernel on a machine without a GPU.

Prints registers, spills and shared memory of each configuration. Fails if attention or sampling spills, or if a kernel
needs more shared memory than the GPU has.
"""

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pagewire.kernels.jit import Configuration

MODULES = (
    "edit_logits",
    "sampler",
    "step_inputs",
    "bookkeeping",
    "paged_attention",
    "split_attention",
    "plan_splits",
    "reduce_splits",
    "rotary_cache",
    "rms_norm",
    "gated",
    "grouped_linear",
    "scatter",
)
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Maximum shared memory of a block in bytes, by compute capability times ten."""


class Usage(NamedTuple):
    """The resources of one compiled kernel."""

    registers: int
    """Registers per thread."""
    spills: int
    """Number of instructions that store or load spilled registers."""
    shared: int
    """Shared memory per block in bytes."""


def compile_configuration(configuration: Configuration, arch: int) -> Usage:
    """Compiles for a compute capability (times ten). Pointers are assumed aligned to 16 bytes, as PyTorch's are.

    Raises:
        triton.TritonError: the kernel does not compile.
        RuntimeError: the machine code cannot be read.
    """
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
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(configuration.options))
    registers, spills = resources(compiled.asm["cubin"])
    return Usage(registers, spills, compiled.metadata.shared)


def resources(cubin: bytes) -> tuple[int, int]:
    """Returns registers per thread and the number of spill instructions, by the machine code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)

        def report(option: str) -> str:
            command = [triton.knobs.nvidia.cuobjdump.path, option, path]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        registers = re.search(r"REG:(\d+)", report("-res-usage"))
        spills = len(re.findall(r"\b(?:STL|LDL)\b", report("-sass")))
    if registers is None:
        raise RuntimeError("cuobjdump reports no registers: use the version that Triton brings")
    return int(registers[1]), spills


def configurations() -> list[tuple[str, Configuration]]:
    """Returns every configuration with the name of its module."""
    return [
        (name, configuration)
        for name in MODULES
        for configuration in importlib.import_module(f"pagewire.kernels.{name}").configurations()
    ]


def compile_form(index: int, arch: int) -> Usage:
    """Compiles entry `index` of `configurations()`, whose entries cannot be pickled for another process."""
    return compile_configuration(configurations()[index][1], arch)


def main(arguments: list[str]) -> int:
    """Compiles the kernels, prints the table and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pagewire.kernels.compile", description=__doc__)
    parser.add_argument("--arch", nargs="+", default=["sm_90"], choices=[f"sm_{arch}" for arch in SHARED_LIMIT])
    parser.add_argument("--kernel", nargs="+", default=MODULES, choices=MODULES, help="only these")
    chosen = parser.parse_args(arguments)
    failed = False
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        for arch in (int(name.removeprefix("sm_")) for name in chosen.arch):
            print(f"{f'sm_{arch}':<48}{'registers':>10}{'spills':>8}{'shared':>8}{'warps':>7}")
            forms = [
                (index, module, configuration)
                for index, (module, configuration) in enumerate(configurations())
                if module in chosen.kernel and arch >= configuration.minimum_arch
            ]
            usages = [pool.submit(compile_form, index, arch) for index, *_ in forms]
            for (_, module, configuration), compiling in zip(forms, usages, strict=True):
                usage = compiling.result()
                bad = usage.shared > SHARED_LIMIT[arch] or (usage.spills > 0 and not configuration.spills)
                failed |= bad
                print(
                    f"{f'{module}: {configuration.name}':<48}{usage.registers:>10}{usage.spills:>8}{usage.shared:>8}"
                    f"{configuration.options.get('num_warps', 4):>7}{'  FAILED' if bad else ''}",
                    flush=True,
                )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
