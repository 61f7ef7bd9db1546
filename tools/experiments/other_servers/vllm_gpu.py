"""Compares vLLM with Pagewire on one GPU, one after the other, under the same requests of `pagewire bench serve`.

Both serve a model of random weights (`--load-format dummy`) with the same limits, and otherwise their own defaults. On
a machine without a network, `vllm/gpu/unpack.sh` unpacks what `vllm/gpu/pack.sh` has packed on another one; docs/gpu.md
has the commands. Results are written after each stage, so a table has whatever both sides have by then.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagewire.bench._common.output import machine, markdown
from pagewire.bench.shapes import SHAPES
from pagewire.shared.errors import ConfigurationError
from tools.experiments.other_servers.vllm.gpu_inputs import STAGES, WARM_UP, Stage, write_dummy_model, write_requests
from tools.experiments.other_servers.vllm.servers import free_port, server

SIDES = ("pagewire", "vllm")
LIMITS = (
    *("--served-model-name", "m", "--host", "127.0.0.1", "--dtype", "bfloat16", "--load-format", "dummy"),
    *("--max-model-len", "8192", "--max-num-seqs", "256", "--max-num-batched-tokens", "8192", "--seed", "0"),
)
"""Arguments of both servers. Prefix caches stay on, which is the default of both: no two prompts begin alike."""
ON_GPU = ("--gpu-memory-utilization", "0.9")
DRIVER_LIBRARIES = "/usr/local/nvidia/lib64:/usr/local/nvidia/lib"
"""Folders in which NVML, which vLLM asks for the GPU, lies in some containers."""
PROCESSES = 4
"""Client processes of a stage, so that none is the bottleneck."""
LEAST_TIME = 8.0
"""Seconds below which a stage is not begun."""
COLUMNS: Mapping[str, tuple[str, str]] = {
    "TTFT ms median": ("ttft", "median"),
    "TTFT P99": ("ttft", "p99"),
    "TPOT ms median": ("tpot", "median"),
    "ITL ms P99": ("itl", "p99"),
}
"""Figures of `pagewire bench serve` beside the tokens per second, by their headings. Less is better."""


def main(arguments: list[str]) -> int:
    """Measures, and prints the table of all results in the folder; exit code 1 if a side has no figures."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments vllm_gpu", description=__doc__)
    parser.add_argument("results", type=Path, help="folder of the results; the table shows all that it has")
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES), help="in order; none: only the table")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--packages", type=Path, default=Path("/tmp/versus"), help="folder that unpack.sh has filled")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for everything; later stages are left out")
    parser.add_argument("--tag", default="", help="part of the results' names, for runs with other arguments")
    parser.add_argument("--pagewire-args", default="", help="more arguments of Pagewire's server, in one text")
    parser.add_argument("--vllm-args", default="", help="more arguments of vLLM's server, in one text")
    parser.add_argument("--vllm", help="vLLM's executable, instead of the unpacked one")
    parser.add_argument("--device", default="cuda", help="Pagewire's; a simulated one shows that the commands work")
    parser.add_argument("--model", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the requests of each stage")
    options = parser.parse_args(arguments)
    options.results.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.limit
    for side in options.sides:
        _measure(side, options, deadline)
    runs = {side: _read(options.results / f"{side}{options.tag}.json") for side in SIDES}
    print("\n".join(table({side: run["stages"] for side, run in runs.items() if run})))
    return 0 if all(runs[side] for side in options.sides) else 1


def table(stages: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the figures of each side's stages, and their ratios, in Markdown. Above 1 is better for Pagewire."""
    rows = []
    for name, stage in STAGES.items():
        figures = {side: of_side[name] for side, of_side in stages.items() if "milliseconds" in of_side.get(name, {})}
        for side, values in figures.items():
            cells = [f"{number:.1f}" for number in _numbers(values)]
            answered = f"{values['completed']}/{values['completed'] + values['failed']}"
            rows.append(" | ".join([stage.title, side, *cells, answered]))
        if len(figures) == len(SIDES):
            ours, theirs = (_numbers(figures[side]) for side in SIDES)
            ratios = [ours[0] / theirs[0], *(b / a for a, b in zip(ours[1:], theirs[1:], strict=True))]
            rows.append(" | ".join([stage.title, "ratio", *(f"{ratio:.2f}x" for ratio in ratios), ""]))
    return markdown(" | ".join(["load", "side", "tokens/s", *COLUMNS, "answered"]), rows)


def _numbers(figures: Mapping[str, Any]) -> list[float]:
    times = figures["milliseconds"]
    return [figures["output_tokens_per_second"], *((times[name] or {key: 0.0})[key] for name, key in COLUMNS.values())]


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def _measure(side: str, options: argparse.Namespace, deadline: float) -> None:
    """Starts a server, runs the stages, and writes down what comes out after each of them."""
    port = free_port()
    run: dict[str, Any] = {"side": side, "machine": machine(), "began": time.strftime("%F %T"), "stages": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_dummy_model(options.model, folder / "model")
        command, environment = _command(side, options, folder / "model", port)
        run["command"] = command
        log = options.results / f"{side}{options.tag}.log"
        with server(command, port, log, environment) as ready_after:
            run["ready_after"] = ready_after
            print(f"{side}: ready after {ready_after:.1f} s", flush=True)
            for title, stage in {"warm-up": WARM_UP, **{name: STAGES[name] for name in options.stages}}.items():
                left = deadline - time.monotonic()
                figures = (
                    _drive(stage, port, folder, options.scale, left) if left > LEAST_TIME else {"error": "no time"}
                )
                run["stages"][title] = figures
                print(f"{side}: {title}: {json.dumps(figures)}", flush=True)
                (options.results / f"{side}{options.tag}.json").write_text(json.dumps(run, indent=1) + "\n")


def _drive(stage: Stage, port: int, folder: Path, scale: float, limit: float) -> dict[str, Any]:
    """Returns the figures of a stage, or its error."""
    requests, output = folder / "requests.jsonl", folder / "figures.json"
    count = write_requests(stage, requests, scale)
    clients = stage.clients or count
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pagewire", "bench", "serve", "--url", f"http://127.0.0.1:{port}", "--model", "m"]
    command += ["--dataset-path", str(requests), "--num-prompts", str(count)]
    command += ["--max-concurrency", str(clients), "--processes", str(min(PROCESSES, clients)), "--output", str(output)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not ended after {limit:.0f} s"}
    if not output.exists():
        return {"error": done.stderr[-500:]}
    figures: dict[str, Any] = json.loads(output.read_text())["figures"]
    return figures


def _command(side: str, options: argparse.Namespace, model: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Returns the command of a server, and what its environment has beside this one's."""
    more: str = options.pagewire_args if side == "pagewire" else options.vllm_args
    arguments = ["serve", str(model), "--port", str(port), *LIMITS, *(ON_GPU if options.device == "cuda" else ())]
    arguments += more.split()
    libraries = ":".join(filter(None, [os.environ.get("LD_LIBRARY_PATH"), DRIVER_LIBRARIES]))
    environment = {"LD_LIBRARY_PATH": libraries, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if side == "pagewire":
        return [sys.executable, "-m", "pagewire", *arguments, "--device", options.device], environment
    arguments += ["--disable-uvicorn-access-log"]
    if options.vllm:
        return [options.vllm, *arguments], environment
    packages = options.packages / "vllm"
    if not packages.is_dir():
        raise ConfigurationError(f"{packages} has no vLLM: run vllm/gpu/unpack.sh first, or give --vllm")
    environment |= {"PYTHONPATH": str(packages), "VLLM_CACHE_ROOT": str(options.packages / "cache")}
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments], environment
