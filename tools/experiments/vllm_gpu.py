"""Compares vLLM with Pagewire on one GPU: the same requests from the same client, one side after the other.

Both serve a model of Llama-3-8B's sizes in bf16 with random weights, with the same limits and otherwise their own
defaults. Results are written after each stage, whatever happens in the next one. docs/gpu.md has the plan of a run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagewire.bench._common.output import add_output, markdown, write
from tools.experiments.vllm.inputs import GPU_SHAPES, write_shape
from tools.experiments.vllm.servers import COMMON, QUIET, free_port, server
from tools.experiments.vllm.stages import STAGES, WARM_UP, figures, run

SIDES = ("pagewire", "vllm")
LIMITS = {
    "--load-format": "dummy",
    "--max-model-len": "8192",
    "--max-num-seqs": "256",
    "--max-num-batched-tokens": "8192",
    "--seed": "0",
}
"""Arguments of both servers beside `COMMON`. Prefix caches stay on, as by default: no two prompts begin alike."""
SHOWN = {
    "output_per_s": "out tokens/s",
    "ttft_median": "TTFT ms median",
    "ttft_p99": "P99",
    "tpot_median": "TPOT ms median",
    "itl_p95": "ITL ms P95",
    "itl_p99": "ITL ms P99",
}
"""Columns of the table by the name of the figure. Only of the first, more is better."""
LEAST = 8.0
"""Seconds below which a stage is left out."""
FREE_BELOW = 3000
"""MiB of the GPU's memory that may be in use when the next server starts."""
_DRIVERS = "/usr/local/nvidia/lib64:/usr/local/nvidia/lib"
"""Folders where NVML may lie, which vLLM asks for the GPU."""


def main(arguments: list[str]) -> int:
    """Measures one side or both, prints the table and writes `--output`."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments vllm_gpu", description=__doc__)
    parser.add_argument("--only", choices=SIDES, help="one side")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--limit", type=float, default=540.0, help="seconds of each side; later stages are left out")
    parser.add_argument("--stage-limit", type=float, default=60.0, help="seconds of a stage; later requests are late")
    parser.add_argument("--target", type=Path, default=Path("/tmp/versus"), help="where gpu/unpack.sh has unpacked")
    parser.add_argument("--pagewire-args", default="", help="more flags for Pagewire, in one string")
    parser.add_argument("--vllm-args", default="", help="more flags for vLLM, in one string")
    parser.add_argument("--table", nargs="+", type=Path, help="only print the table of these results")
    without = parser.add_argument_group("without a GPU")
    without.add_argument("--device", default="cuda", help="Pagewire's")
    without.add_argument("--shape", choices=GPU_SHAPES, default="llama-3-8b")
    without.add_argument("--scale", type=float, default=1.0, help="of the numbers of requests")
    without.add_argument("--vllm-command", help="instead of the unpacked vLLM")
    add_output(parser)
    options = parser.parse_args(arguments)
    if options.table:
        stored = [json.loads(file.read_text())["sides"] for file in options.table]
        print("\n".join(table({side: result for sides in stored for side, result in sides.items()})))
        return 0
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        model = Path(name, "model")
        write_shape(options.shape, model)
        for side in [options.only] if options.only else SIDES:
            for result in measure(side, options, model):
                results[side] = result
                write(options.output, parser.prog, arguments, gpu=gpu("name"), sides=results)
    print("\n".join(table(results)))
    return int(any("failed" in result for result in results.values()))


def measure(side: str, options: argparse.Namespace, model: Path) -> Iterator[dict[str, Any]]:
    """Yields the results of a side so far, after each stage."""
    deadline = time.monotonic() + options.limit
    port, log = free_port(), Path(tempfile.gettempdir(), f"versus-{side}.log")
    command, environment = command_of(side, options, model, port)
    result: dict[str, Any] = {"command": command, "stages": {}}
    try:
        with server(command, port, log, environment, options.limit / 2) as seconds:
            result["ready_after_s"] = seconds
            print(f"{side} ready after {seconds:.1f} s", flush=True)
            for name, stage in {"warm-up": WARM_UP, **{name: STAGES[name] for name in options.stages}}.items():
                left = deadline - time.monotonic() - 20
                if left < LEAST:
                    result["stages"][name] = {"failed": "no time was left"}
                    continue
                url = f"http://127.0.0.1:{port}"
                records = run(url, name, stage, options.scale, min(options.stage_limit, left))
                result["stages"][name] = figures(records) | {"clocks": gpu("clocks.sm,temperature.gpu,power.draw")}
                print(f"{side} {name}: {json.dumps(result['stages'][name])}", flush=True)
                yield result
    except SystemExit as error:
        result["failed"] = str(error)
        print(f"{side}: {error}", file=sys.stderr, flush=True)
    _until_free()
    yield result


def command_of(side: str, options: argparse.Namespace, model: Path, port: int) -> tuple[list[str], Mapping[str, str]]:
    """Returns the command that serves, and what its environment has beside this one's."""
    limits = [part for pair in (COMMON | LIMITS).items() for part in pair]
    limits += ["--gpu-memory-utilization", "0.9"] if options.device == "cuda" else []
    both = ["serve", str(model), "--port", str(port), *limits]
    libraries = ":".join(filter(None, [os.environ.get("LD_LIBRARY_PATH"), _DRIVERS]))
    environment = QUIET | {"LD_LIBRARY_PATH": libraries, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if side == "pagewire":
        programs = f"{options.target / 'pagewire' / 'bin'}:{os.environ['PATH']}"
        own = ["--device", options.device, "--nats-port", "0", *options.pagewire_args.split()]
        return [sys.executable, "-m", "pagewire", *both, *own], environment | {"PATH": programs}
    environment |= {"VLLM_CACHE_ROOT": str(options.target / "cache")}
    begin = (options.vllm_command or f"{sys.executable} -m vllm.entrypoints.cli.main").split()
    if not options.vllm_command:
        environment |= {"PYTHONPATH": str(options.target / "vllm")}
    return [*begin, *both, "--disable-uvicorn-access-log", *options.vllm_args.split()], environment


def table(sides: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns both sides' figures and their ratios, in Markdown; above 1 is better for Pagewire."""
    rows = []
    for name, stage in STAGES.items():
        both = {side: result["stages"][name] for side, result in sides.items() if name in result["stages"]}
        for side, values in both.items():
            cells = [f"{values[key]:.1f}" if key in values else "" for key in SHOWN]
            answered = f"{values.get('answered', 0)} of {values.get('requests', 0)}"
            rows.append(" | ".join([stage.title, side, *cells, answered]))
        if all("output_per_s" in both.get(side, {}) for side in SIDES):
            rows.append(" | ".join([stage.title, "ratio", *_ratios(both["pagewire"], both["vllm"]), ""]))
    lines = markdown(" | ".join(["load", "side", *SHOWN.values(), "answered"]), rows)
    starts = [f"{side} {result['ready_after_s']:.1f}" for side, result in sides.items() if "ready_after_s" in result]
    return [*lines, "", f"ready after seconds: {', '.join(starts)}"]


def gpu(fields: str) -> str:
    """Returns what nvidia-smi says of the GPU; empty: there is none."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _ratios(ours: Mapping[str, float], theirs: Mapping[str, float]) -> Sequence[str]:
    ratios = []
    for key in SHOWN:
        better, worse = (ours, theirs) if key == "output_per_s" else (theirs, ours)
        ratios.append(f"{better[key] / worse[key]:.2f}x" if worse[key] else "")
    return ratios


def _until_free() -> None:
    """Waits until the ended server's memory is free again, 20 s at most."""
    for _ in range(40):
        used = gpu("memory.used").partition(" ")[0]
        if not used or int(used) < FREE_BELOW:
            return
        time.sleep(0.5)
