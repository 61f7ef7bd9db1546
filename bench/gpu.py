"""Measures the `cuda` device on this machine's GPU: steps, kernels, products, gaps, and the pipeline under load.

Models have the sizes of published ones and random weights. Every share is of a rate that was measured in the same run.
Parts are independent: one that fails is reported, and the others run.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from triton.errors import TritonError

from pagewire.bench._common.output import add_output, write
from pagewire.bench._gpu import kernels, linear, load, profile, steps
from pagewire.bench._gpu.machine import Machine, description, measured, simulated
from pagewire.bench._gpu.plan import Cell, grid
from pagewire.bench.shapes import SHAPES
from pagewire.services.executor.devices.cuda.attention.flashinfer_backend import FlashInferBackend
from pagewire.services.executor.devices.cuda.attention.flashinfer_limits import find_flashinfer
from pagewire.services.executor.devices.cuda.open import check_cache
from pagewire.services.executor.devices.cuda.part import BACKENDS, FP8, GRAPHS
from pagewire.services.executor.devices.cuda.runtime import CudaRuntime
from pagewire.shared.errors import ConfigurationError, PagewireError
from pagewire.shared.settings.config import Settings
from pagewire.shared.settings.flags import Parser
from pagewire.shared.telemetry import logs

MODELS = ("llama-3-8b", "qwen3-0.6b", "qwen3-14b")
ROWS = (1, 8, 32, 64, 128, 256)
CONTEXTS = (512, 4096, 16384)
PROMPTS = (512, 1024, 2048, 4096, 8192)
KERNEL_CELLS = (Cell(1, 16384), Cell(8, 4096), Cell(64, 4096), Cell(256, 512))
LINEAR_ROWS = (1, 16, 64, 512)
MEMORY_SHARE = 0.9
"""Share of the free memory for weights and KV cache, less `GRAPHS`; activations and graphs take the rest."""
DECODE_STEPS = 64
PREFILL_REPEATS = 5
PROFILED = Cell(64, 4096)
PROFILED_STEPS = 50


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the benchmark."""

    run: Callable[[Machine, argparse.Namespace], Iterator[Any]]
    """Yields dataclasses with the raw results."""
    table: Callable[[Sequence[Any]], list[str]]


def _shapes(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    return {name: SHAPES[name] for name in options.models}


def _cached(machine: Machine, options: argparse.Namespace) -> torch.dtype:
    return FP8 if options.kv_cache_dtype == "fp8" else machine.dtype


def _decode(machine: Machine, options: argparse.Namespace) -> Iterator[steps.DecodeRun]:
    return steps.decode(machine, _shapes(options), grid(ROWS, CONTEXTS), DECODE_STEPS, _cached(machine, options))


def _prefill(machine: Machine, options: argparse.Namespace) -> Iterator[steps.PrefillRun]:
    return steps.prefill(machine, _shapes(options), PROMPTS, PREFILL_REPEATS, _cached(machine, options))


def _kernels(machine: Machine, options: argparse.Namespace) -> Iterator[kernels.KernelRun]:
    return kernels.kernels(machine, _shapes(options), KERNEL_CELLS, PROMPTS)


def _linear(machine: Machine, options: argparse.Namespace) -> Iterator[linear.LinearRun]:
    return linear.linear(machine, _shapes(options), LINEAR_ROWS)


def _profile(machine: Machine, options: argparse.Namespace) -> Iterator[profile.ProfileRun]:
    return profile.profile(machine, _shapes(options), PROFILED, PROFILED_STEPS)


def _load(machine: Machine, options: argparse.Namespace) -> Iterator[load.LoadRun]:
    return load.load(_shapes(options), options.streams, options.requests, machine.bandwidth, machine.runtime.device)


PARTS: Mapping[str, Section] = {
    "decode": Section(_decode, steps.decode_table),
    "prefill": Section(_prefill, steps.prefill_table),
    "kernels": Section(_kernels, kernels.table),
    "linear": Section(_linear, linear.table),
    "profile": Section(_profile, profile.table),
    "load": Section(_load, load.table),
}


def main(arguments: list[str]) -> int:
    """Prints a table per part and writes `--output`. Exit code 1 if a part failed or a step waited for the host.

    Raises:
        ConfigurationError: there is no GPU, it does not convert fp8 and the cache is to be kept so, or what is to
            attend is not installed.
    """
    parser = Parser(prog="pagewire bench gpu", description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help=f"by default all: {', '.join(PARTS)}",
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=SHAPES, help="shapes")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp8"], help="for decode and prefill")
    parser.add_argument(
        "--attention-backend", default="triton", choices=BACKENDS, help="for decode, prefill and profile"
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256], help="load: slots")
    parser.add_argument("--requests", type=int, default=1000, help="load: per run")
    add_output(parser)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise ConfigurationError("bench gpu needs a GPU that PyTorch can use, and there is none")
    check_cache(options.kv_cache_dtype, torch.cuda.get_device_capability())
    logs.configure(Settings(log_level="warning"), service="bench")
    backend = BACKENDS[options.attention_backend]
    if backend is FlashInferBackend:
        find_flashinfer()
    runtime = CudaRuntime()
    room = int(torch.cuda.mem_get_info()[0] * MEMORY_SHARE) - GRAPHS
    known = simulated(torch.cuda.get_device_name())
    machine = replace(measured(runtime, torch.bfloat16, room), backend=backend, simulated=known)
    return report(machine, options, arguments)


def report(machine: Machine, options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Runs the parts, and writes the results after each, so that they survive a later part that fails."""
    about = description(machine.runtime.device)
    rates = {"copy_bytes_per_s": machine.bandwidth, "matrix_flops_per_s": machine.rate}
    results: dict[str, Any] = (
        about
        | rates
        | {
            "kv_cache_dtype": options.kv_cache_dtype,
            "attention_backend": options.attention_backend,
            "parts": {},
        }
    )
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"copies {machine.bandwidth / 1e12:.2f} TB/s, multiplies {machine.rate / 1e12:.0f} TFLOP/s: measured")
    syncs, failures = 0, {}
    for name in options.parts:
        try:
            runs = list(PARTS[name].run(machine, options))
        except (RuntimeError, TritonError, PagewireError) as error:  # the GPU may be lent for this hour only
            failures[name] = str(error)
            print(f"\n### {name}\n\nfailed: {error}", flush=True)
            write(options.output, "pagewire bench gpu", arguments, **results, failures=failures)
            continue
        print("\n".join(["", f"### {name}", "", *PARTS[name].table(runs)]), flush=True)
        results["parts"][name] = [asdict(run) for run in runs]
        syncs += sum(len(run.host_syncs) for run in runs if isinstance(run, profile.ProfileRun))
        write(options.output, "pagewire bench gpu", arguments, **results, failures=failures)
    if syncs:
        print(f"\n{syncs} gaps between steps are host syncs: the step loop is not free of them")
    return int(syncs > 0 or bool(failures))
