"""DeepSpeed-FastGen's benchmark in virtual time: SplitFuse against whole prompts first, Llama-2-70B on 4 x A100.

Closed loop: each client sends its next request when its last one has ended. The other side is an ablation of our own,
prompts first and whole as in vLLM 0.2, with the same pipeline around it; its prompt steps hold up to 4096 tokens.
Every figure is simulated.
"""

import argparse
import json
import os
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pagewire.bench._output import folder
from pagewire.bench._report import QUANTILES, Points, chart, markdown, mean
from pagewire.bench._simulation.loads import fastgen
from pagewire.bench._simulation.pipeline import Request, Trace
from pagewire.bench._simulation.service_level import (
    FASTGEN,
    TIGHT,
    effective_throughput,
    throughput,
    throughput_by_latency,
    token_intervals,
)
from pagewire.bench._simulation.systems import System, Variant, pipeline

SYSTEM = System("llama-2-70b", "a100-80", 4, 4096)
PAIRS = ((1200, 60), (1200, 128), (2600, 60), (2600, 128))
CLIENTS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32)
SEEDS = (42, 43, 44)
LEVELS = FASTGEN + TIGHT
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


def main(arguments: list[str]) -> int:
    """Prints the tables; writes them, their JSON and the plots."""
    parser = argparse.ArgumentParser(prog="pagewire bench fastgen", description=__doc__)
    parser.add_argument("--budget", type=int, default=512, help="tokens per step of SplitFuse")
    parser.add_argument("--requests", type=int, help="per run; by default 4 for each client and 32")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, help="closed-loop clients")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--output", type=folder, default=Path("bench/results"), help="folder")
    given = parser.parse_args(arguments)
    cells = measure(given.clients, given.budget, given.requests, given.jobs)
    lines = [
        f"Simulated {SYSTEM.name}, budget {given.budget} tokens (prefill first: prompts up to {SYSTEM.longest} a step),"
        f" {given.requests or '4 per client and 32'} requests per run, means of seeds {SEEDS}.",
        "",
        *tables(cells),
    ]
    print("\n".join(lines))
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "fastgen.md").write_text("\n".join(lines) + "\n")
    records = [{"simulated": True, "budget": given.budget, **c._asdict(), "seeds": runs} for c, runs in cells.items()]
    (given.output / "fastgen.json").write_text(json.dumps(records, indent=1) + "\n")
    for name, picture in charts(cells).items():
        (given.output / f"fastgen-{name}.svg").write_text(picture)
    return 0


def measure(clients: Sequence[int], budget: int, requests: int | None, jobs: int | None) -> Cells:
    """The figures of every cell, one set per seed."""
    cells = [Cell(engine, *pair, c) for engine, pair, c in product((SPLITFUSE, PREFILL_FIRST), PAIRS, clients)]
    runs = [Run(cell, budget, requests or 4 * cell.clients + 32, seed) for cell in cells for seed in SEEDS]
    with ProcessPoolExecutor(jobs) as pool:
        found = iter(pool.map(simulate, runs))
        return {cell: [next(found) for _ in SEEDS] for cell in cells}


def simulate(run: Run) -> dict[str, float]:
    """The figures of one run."""
    cell, requests = run.cell, closed_loop(run).requests
    intervals = token_intervals(requests)
    return {
        "throughput": throughput(requests),
        "throughput_by_latency": throughput_by_latency(requests, cell.clients),
        "latency": float(np.mean([request.latency for request in requests])),
        "ttft": float(np.mean([request.ttft for request in requests])),
        **{f"itl_{name}": float(np.percentile(intervals, q)) for name, q in QUANTILES.items()},
        **{level.name: effective_throughput(requests, level) for level in LEVELS},
    }


def closed_loop(run: Run) -> Trace:
    """`requests` of all clients together. Each client begins within 10 ms for every client that there is."""
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


def tables(cells: Cells) -> list[str]:
    """Markdown, one table per pair, with every client count."""
    header = [
        "clients", "engine", "req/s", "req/s by latency", "latency s", "TTFT s",
        "ITL ms median / P90 / P95 / P99", *(f"at {level.name}" for level in LEVELS),
    ]  # fmt: skip
    lines = []
    for pair in PAIRS:
        rows = [
            _row(cell, mean(runs))
            for cell, runs in sorted(cells.items(), key=lambda item: (item[0].clients, item[0].engine))
            if cell[1:3] == pair
        ]
        lines += [f"### {pair[0]}/{pair[1]} (simulated)", "", *markdown(header, rows), "", *_summary(cells, pair), ""]
    return lines


def _row(cell: Cell, found: Mapping[str, float]) -> list[str]:
    return [
        str(cell.clients),
        cell.engine,
        f"{found['throughput']:.2f}",
        f"{found['throughput_by_latency']:.2f}",
        f"{found['latency']:.2f}",
        f"{found['ttft']:.2f}",
        " / ".join(f"{found[f'itl_{name}'] * 1e3:.0f}" for name in QUANTILES),
        *(f"{found[level.name]:.2f}" for level in LEVELS),
    ]


def _summary(cells: Cells, pair: tuple[int, int]) -> list[str]:
    """The ratios that FastGen's publication gives."""
    ours, theirs = (
        {c[3]: mean(r) for c, r in cells.items() if c[:3] == (e, *pair)} for e in (SPLITFUSE, PREFILL_FIRST)
    )
    level = FASTGEN[1].name

    def peak(engine: Mapping[int, Mapping[str, float]], name: str) -> float:
        return max(found[name] for found in engine.values())

    lines = [
        f"- Highest throughput: {peak(ours, 'throughput'):.2f} against {peak(theirs, 'throughput'):.2f} requests/s.",
        f"- Highest effective throughput at {level}: {peak(ours, level):.2f} against {peak(theirs, level):.2f}"
        f" requests/s, {_ratio(peak(ours, level), peak(theirs, level))}.",
    ]
    for clients in sorted(ours.keys() & {16}):
        a, b = ours[clients], theirs[clients]
        lines += [
            f"- {clients} clients: P95 between tokens {a['itl_p95'] * 1e3:.0f} against {b['itl_p95'] * 1e3:.0f} ms,"
            f" {_ratio(b['itl_p95'], a['itl_p95'])} lower; effective throughput at {level}"
            f" {a[level]:.2f} against {b[level]:.2f} requests/s, {_ratio(a[level], b[level])}."
        ]
    return lines


def _ratio(more: float, less: float) -> str:
    return f"{more / less:.2f}x" if less else "the other has none"


def charts(cells: Cells) -> dict[str, str]:
    """Per pair, latency over throughput and effective throughput over clients."""
    pictures = {}
    for prompt, output in PAIRS:
        curves: dict[str, Points] = {}
        effective: dict[str, Points] = {}
        for engine in (SPLITFUSE, PREFILL_FIRST):
            points = {c.clients: mean(r) for c, r in cells.items() if c[:3] == (engine, prompt, output)}
            curves[engine] = [(p["throughput"], p["latency"]) for p in points.values()]
            for level in FASTGEN:
                effective[f"{engine}, {level.rate:g}/s"] = [(float(n), p[level.name]) for n, p in points.items()]
        title = f"{prompt}/{output}, {SYSTEM.name}, simulated"
        pictures[f"{prompt}-{output}-latency"] = chart(title, "requests/s", "mean latency, s", curves)
        pictures[f"{prompt}-{output}-effective"] = chart(title, "clients", "requests/s within the level", effective)
    return pictures
