"""Runs DeepSpeed-FastGen's benchmark in virtual time: SplitFuse against whole prompts first (simulated).

Llama-2-70B on four A100. Each client sends its next request when its last one has ended. The other side is an ablation
of our own, prompts first and whole as in vLLM 0.2, with the same pipeline around it; its prompt steps hold up to 4096
tokens. Every figure is simulated.
"""

import argparse
import math
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from pagewire.bench._common.loads import Request, fastgen
from pagewire.bench._common.output import add_output, markdown, spread, write
from tools.experiments._common.chart import Points, chart
from tools.experiments.simulated_devices.virtual_time.figures import QUANTILES, mean
from tools.experiments.simulated_devices.virtual_time.pipeline import Trace
from tools.experiments.simulated_devices.virtual_time.service_level import (
    FASTGEN,
    effective_throughput,
    throughput,
    token_intervals,
)
from tools.experiments.simulated_devices.virtual_time.systems import System, Variant, pipeline

SYSTEM = System("llama-2-70b", "a100-80", 4, 4096)
PAIRS = ((1200, 60), (1200, 128), (2600, 60), (2600, 128))
CLIENTS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32)
SEEDS = (42, 43, 44)
COMPARED = 16
"""Clients whose figures the summary compares."""
SPLITFUSE, PREFILL_FIRST = "SplitFuse", "prefill first"


class Cell(NamedTuple):
    """One point of a curve."""

    engine: str
    prompt: int
    output: int
    clients: int


class Run(NamedTuple):
    """A cell's run with one seed."""

    cell: Cell
    budget: int
    requests: int
    seed: int


Cells = Mapping[Cell, list[dict[str, float]]]
"""Figures, one set per seed."""
Curve = Mapping[int, Mapping[str, float]]
"""Figures by clients."""

SHOWN_OUTPUT = "60 out"


def main(arguments: list[str]) -> int:
    """Prints the ratios and writes `--output`."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments fastgen", description=__doc__)
    parser.add_argument("--budget", type=int, default=512, help="tokens per step of SplitFuse")
    parser.add_argument("--requests", type=int, help="per run; by default 4 for each client and 32")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, help="closed-loop clients")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    add_output(parser)
    options = parser.parse_args(arguments)
    cells = measure(options.clients, options.budget, options.requests, options.jobs)
    print(
        f"Simulated {SYSTEM.name}, budget {options.budget} tokens (prefill first: prompts up to {SYSTEM.longest} a"
        f" step), {options.requests or '4 per client and 32'} requests per run, means of seeds {SEEDS}.\n"
    )
    print("\n".join(summary(cells)))
    records = [{"budget": options.budget, **cell._asdict(), "seeds": runs} for cell, runs in cells.items()]
    write(options.output, parser.prog, arguments, simulated=True, runs=records)
    return 0


def measure(clients: Sequence[int], budget: int, requests: int | None, jobs: int | None) -> Cells:
    """Returns the figures of every cell, one set per seed."""
    cells = [Cell(engine, *pair, c) for engine, pair, c in product((SPLITFUSE, PREFILL_FIRST), PAIRS, clients)]
    runs = [Run(cell, budget, requests or 4 * cell.clients + 32, seed) for cell in cells for seed in SEEDS]
    with ProcessPoolExecutor(jobs) as pool:
        results = iter(pool.map(simulate, runs))
        return {cell: [next(results) for _ in SEEDS] for cell in cells}


def simulate(run: Run) -> dict[str, float]:
    """Returns the figures of one run."""
    requests = closed_loop(run).requests
    intervals = token_intervals(requests)
    return {
        "throughput": throughput(requests),
        "latency": float(np.mean([request.latency for request in requests])),
        "ttft": float(np.mean([request.ttft for request in requests])),
        **{f"itl_{name}": float(np.percentile(intervals, q)) for name, q in QUANTILES.items()},
        **{level.name: effective_throughput(requests, level) for level in FASTGEN},
    }


def closed_loop(run: Run) -> Trace:
    """Serves `run.requests` requests of all clients together.

    Each client begins within 10 ms for every client that there is.
    """
    cell = run.cell
    lengths = fastgen(cell.prompt, cell.output, run.seed)
    draw = random.Random(run.seed)
    left = run.requests - cell.clients

    def following(ended: Request) -> Request | None:
        nonlocal left
        left -= 1
        if left < 0:
            return None
        request = next(lengths)
        request.at, request.client = ended.tokens_at[-1], ended.client
        return request

    first = [next(lengths) for _ in range(cell.clients)]
    for client, request in enumerate(first):
        request.client, request.at = client, draw.uniform(0, cell.clients) * 0.01
    variant = Variant(splitfuse=cell.engine == SPLITFUSE, budget=run.budget)
    return pipeline(SYSTEM, variant).run(first, following)


def summary(cells: Cells) -> list[str]:
    """Returns the ratios that FastGen's publication gives, in Markdown."""
    level = FASTGEN[1].name
    header = (
        f"simulated | highest requests/s | highest effective requests/s at {level} | P95 ITL, {COMPARED} clients"
        f" | effective requests/s, {COMPARED} clients"
    )
    return markdown(header, (" | ".join(row) for row in ratios(cells) if row[0].endswith(SHOWN_OUTPUT)))


def ratios(cells: Cells) -> list[list[str]]:
    """Returns the lines of `summary`, one per pair of lengths.

    Above 1 is better for SplitFuse. The range is that of the seeds.
    """
    level = FASTGEN[1].name
    measures: list[Callable[[Curve], float]] = [
        lambda curve: max(point["throughput"] for point in curve.values()),
        lambda curve: max(point[level] for point in curve.values()),
        lambda curve: 1 / curve[COMPARED]["itl_p95"],
        lambda curve: curve[COMPARED][level],
    ]
    rows = []
    for pair in PAIRS:
        ours, theirs = (_curves(cells, (engine, *pair)) for engine in (SPLITFUSE, PREFILL_FIRST))
        row = [f"{pair[0]} in, {pair[1]} out"]
        for measure in measures if COMPARED in ours[0] else measures[:2]:
            values = [(measure(a), measure(b)) for a, b in zip(ours, theirs, strict=True)]
            value, *samples = (a / b if b else math.inf for a, b in values)
            row.append(spread(value, samples))
        rows.append(row + [""] * (len(measures) + 1 - len(row)))
    return rows


def _curves(cells: Cells, side: tuple[str, int, int]) -> list[Curve]:
    """Returns the figures by clients: the means of the seeds, and behind them those of each seed."""
    runs = {cell.clients: runs for cell, runs in cells.items() if cell[:3] == side}
    means = {clients: mean(seeds) for clients, seeds in runs.items()}
    return [means, *({clients: seeds[i] for clients, seeds in runs.items()} for i in range(len(SEEDS)))]


def curves(cells: Cells, prompt: int, output: int) -> str:
    """Draws effective throughput over clients, of a pair of lengths."""
    lines: dict[str, Points] = {}
    for engine in (SPLITFUSE, PREFILL_FIRST):
        points = {cell.clients: mean(runs) for cell, runs in cells.items() if cell[:3] == (engine, prompt, output)}
        for level in FASTGEN:
            lines[f"{engine}, {level.rate:g}/s"] = [(float(n), point[level.name]) for n, point in points.items()]
    return chart(f"{prompt}/{output}, {SYSTEM.name}, simulated", "clients", "requests/s within the level", lines)


def read(records: Iterable[Mapping[str, Any]]) -> Cells:
    """Returns the cells of raw results."""
    return {Cell(run["engine"], run["prompt"], run["output"], run["clients"]): run["seeds"] for run in records}
