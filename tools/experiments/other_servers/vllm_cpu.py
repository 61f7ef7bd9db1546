"""Compares vLLM's CPU server with Pagewire under vLLM's own load generator, one after the other on this machine.

vLLM is not among the requirements: `vllm/setup_vllm_cpu.sh FOLDER` installs it into an environment of its own. Ratios
above 1 are better for Pagewire, and hold for the machine only that they were measured on.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagewire.bench._common.output import add_output, markdown, spread, write
from tools.experiments.other_servers.vllm.inputs import MODELS, write_model, write_prompts
from tools.experiments.other_servers.vllm.servers import QUIET, executable, turns

MEASURES: Mapping[str, str] = {
    "output_throughput": "tokens/s",
    "median_tpot_ms": "TPOT ms",
    "median_ttft_ms": "TTFT ms",
    "p99_itl_ms": "P99 ITL ms",
}
"""The load generator's names and ours. Only of the first, more is better."""
PROMPTS = 500
LEAST = 20
"""Smallest number of requests of a run, which has two per client."""

Figures = dict[str, float]
Rounds = dict[str, dict[int, list[Figures]]]
"""The rounds of both sides, by clients."""


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments vllm_cpu", description=__doc__)
    parser.add_argument("vllm", type=executable, help="vLLM's executable, as setup_vllm_cpu.sh prints it")
    parser.add_argument("--model", choices=MODELS, default="nano", help="shape; weights are random")
    lengths = "INxOUT random tokens, or sharegpt: lengths of conversations"
    parser.add_argument("--prompts", type=_prompts, default="200x180", help=lengths)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32, 128], help="requests at a time")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each server; figures are medians")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    add_output(parser)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        figures, starts = _measure(options, Path(name))
    print("\n".join(table(figures)))
    print("ready after seconds: " + ", ".join(f"{side} {statistics.median(s):.1f}" for side, s in starts.items()))
    run = {"model": options.model, "prompts": options.prompts, "temperature": options.temperature}
    write(options.output, parser.prog, arguments, runs=[run | {"figures": figures, "ready": starts}])
    return 0


def table(figures: Mapping[str, Mapping[int, list[Figures]]]) -> list[str]:
    """Returns the medians of both sides and their ratios by number of clients, in Markdown."""
    rows = []
    for clients in figures["pagewire"]:
        medians = {side: _medians(runs[clients]) for side, runs in figures.items()}
        ratios = (f"{_ratio(key, medians['pagewire'], medians['vllm']):.2f}x" for key in MEASURES)
        for side, values in medians.items():
            rows.append(" | ".join([str(clients), side, *(f"{value:.2f}" for value in values.values())]))
        rows.append(" | ".join([str(clients), "ratio", *ratios]))
    return markdown(" | ".join(["clients", "side", *MEASURES.values()]), rows)


def comparison(runs: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """Returns the ratios of one of `MEASURES` by model and number of clients, in Markdown, from raw results.

    The range is that of the rounds.
    """
    columns = sorted({int(clients) for run in runs for clients in run["figures"]["vllm"]})
    rows = []
    for run in runs:
        ratios = _ratios(run, key)
        cells = (spread(*ratios[clients]) if clients in ratios else "" for clients in columns)
        rows.append(" | ".join([_label(run), *cells]))
    return markdown(" | ".join([f"{MEASURES[key]}, ratio by clients", *map(str, columns)]), rows)


def headline(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns the ratios of throughput in one line, by model and from few clients to many."""
    by_run = {_label(run): _ratios(run, "output_throughput").values() for run in runs}
    return "; ".join(f"{name}: {' / '.join(f'{ratio:.1f}' for ratio, _ in ratios)}" for name, ratios in by_run.items())


def _label(run: Mapping[str, Any]) -> str:
    return f"{run['model']}, {'temperature 1' if run['temperature'] else 'greedy'}"


def _ratios(run: Mapping[str, Any], key: str) -> dict[int, tuple[float, list[float]]]:
    """Returns the ratio of the medians, and that of each round, by clients."""
    ours, theirs = (run["figures"][side] for side in ("pagewire", "vllm"))
    return {
        int(clients): (
            _ratio(key, _medians(ours[clients]), _medians(theirs[clients])),
            [_ratio(key, *both) for both in zip(ours[clients], theirs[clients], strict=True)],
        )
        for clients in ours
    }


def _medians(rounds: Sequence[Figures]) -> Figures:
    return {key: statistics.median(each[key] for each in rounds) for key in MEASURES}


def _ratio(key: str, ours: Figures, theirs: Figures) -> float:
    return ours[key] / theirs[key] if key == "output_throughput" else theirs[key] / ours[key]


def _measure(options: argparse.Namespace, folder: Path) -> tuple[Rounds, dict[str, list[float]]]:
    """Returns the figures of both sides by clients, and the seconds until each was ready; who goes first alternates."""
    model, prompts = folder / "model", folder / "prompts.jsonl"
    write_model(options.model, model)
    write_prompts(prompts, PROMPTS)
    figures: Rounds = {side: {clients: [] for clients in options.clients} for side in ("pagewire", "vllm")}
    starts: dict[str, list[float]] = {side: [] for side in figures}
    for side, port, seconds in turns(options.vllm, model, options.rounds, folder / "log"):
        starts[side].append(seconds)
        address = f"http://127.0.0.1:{port}"
        load = [str(options.vllm), "bench", "serve", "--base-url", address, "--tokenizer", str(model)]
        _drive([*load, *_random("32x8")], 4, 8, options.temperature)  # nobody is measured cold
        dataset = _conversations(prompts) if options.prompts == "sharegpt" else _random(options.prompts)
        for clients in options.clients:
            count = max(2 * clients, LEAST)
            figures[side][clients].append(_drive([*load, *dataset], clients, count, options.temperature))
    return figures, starts


def _prompts(text: str) -> str:
    prompt, _, output = text.partition("x")
    if text != "sharegpt" and not (prompt.isdecimal() and output.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text} is neither sharegpt nor INxOUT, such as 200x180")
    return text


def _random(size: str) -> list[str]:
    prompt, output = size.split("x")
    return ["--dataset-name", "random", "--random-input-len", prompt, "--random-output-len", output]


def _conversations(file: Path) -> list[str]:
    options = ["--dataset-name", "custom", "--dataset-path", str(file)]
    return [*options, "--custom-output-len", "-1", "--skip-chat-template"]


def _drive(load: list[str], clients: int, count: int, temperature: float) -> Figures:
    """Runs the load generator once and returns its figures."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [*load, "--backend", "openai", "--model", "m", "--ignore-eos", "--temperature", str(temperature)]
        command += ["--num-prompts", str(count), "--max-concurrency", str(clients), "--disable-tqdm"]
        command += ["--percentile-metrics", "ttft,tpot,itl", "--save-result", "--result-dir", folder]
        command += ["--result-filename", result.name]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | QUIET, check=False)
        if not result.exists():
            raise SystemExit(f"vllm_cpu: the load generator failed:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
        figures = json.loads(result.read_text())
    if figures["completed"] != count:
        raise SystemExit(f"vllm_cpu: only {figures['completed']} of {count} requests were answered")
    return {key: float(figures[key]) for key in MEASURES}
