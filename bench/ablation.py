"""What each part of the scheduler is worth: one setting at a time is changed, in virtual time, on simulated GPUs.

The scheduler's policy and the executor's slot table are the real ones; step times come from a roofline. Every figure
is simulated. Each cell is the mean of three seeds.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import NamedTuple

from pagewire.bench._output import folder
from pagewire.bench._report import chart, figures, markdown, mean, milliseconds
from pagewire.bench._simulation.loads import LOADS, poisson
from pagewire.bench._simulation.systems import System, Variant, pipeline

SYSTEMS = (System("llama-3-8b", "h100", 1, 8192), System("llama-3-70b", "h100", 4, 8192))
BASE = Variant()
GROUPS: Mapping[str, Mapping[str, Variant]] = {
    "Lease window": {str(n): Variant(window=n) for n in (1, 2, 4, 8, 16)},
    "SplitFuse": {"on": BASE, "off: prompts first, whole": Variant(splitfuse=False)},
    "Asynchronous output": {"on": BASE, "off": Variant(asynchronous=False)},
    "Prefix cache": {"on": BASE, "off": Variant(prefix_cache=False)},
    "Block size": {str(n): Variant(block_size=n) for n in (1, 16, 64, 256)},
}
SEEDS = (0, 1, 2)
HEADER = ("setting", "requests/s", "tokens/s", "TTFT ms", "TPOT ms", "ITL ms", "busy", "KV waste", "of it reserved")


class Cell(NamedTuple):
    """One place of the tables."""

    system: System
    load: str
    qps: float
    variant: Variant


class Run(NamedTuple):
    """A cell's run with one seed."""

    cell: Cell
    seed: int
    requests: int


def main(arguments: list[str]) -> int:
    """Prints the tables; writes them, their JSON and the plots."""
    parser = argparse.ArgumentParser(prog="pagewire bench ablation", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer requests and rates: under 5 minutes on 2 cores")
    parser.add_argument("--requests", type=int, default=250, help="requests per run")
    parser.add_argument("--qps", type=float, nargs="+", default=[2, 8, 32, math.inf], help="arrival rates")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--output", type=folder, default=Path("bench/results"), help="folder")
    given = parser.parse_args(arguments)
    if given.quick:
        given.requests, given.qps = 60, [8, math.inf]
    began = time.monotonic()
    cells = measure(given.qps, given.requests, given.jobs)
    name = "ablation-quick" if given.quick else "ablation"
    lines = [f"Simulated, {given.requests} requests per run, seeds {SEEDS}.", "", *tables(cells)]
    print("\n".join(lines))
    print(f"{len(cells) * len(SEEDS)} runs in {time.monotonic() - began:.0f} s")
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / f"{name}.md").write_text("\n".join(lines) + "\n")
    (given.output / f"{name}.json").write_text(json.dumps([_record(c, runs) for c, runs in cells.items()], indent=1))
    for system in SYSTEMS:
        (given.output / f"{name}-{system.shape}.svg").write_text(_window_chart(cells, system))
    return 0


def measure(rates: Sequence[float], requests: int, jobs: int | None) -> dict[Cell, list[dict[str, float]]]:
    """The figures of every cell, one set per seed."""
    variants = dict.fromkeys(variant for group in GROUPS.values() for variant in group.values())
    cells = [Cell(*parts) for parts in product(SYSTEMS, LOADS, rates, variants)]
    runs = [Run(cell, seed, requests) for cell in cells for seed in SEEDS]
    with ProcessPoolExecutor(jobs) as pool:
        found = iter(pool.map(simulate, runs, chunksize=len(SEEDS)))
        return {cell: [next(found) for _ in SEEDS] for cell in cells}


def simulate(run: Run) -> dict[str, float]:
    """The figures of one run. A slow rate sends no more than a minute's requests."""
    cell = run.cell
    count = run.requests if math.isinf(cell.qps) else min(run.requests, max(60, round(60 * cell.qps)))
    return figures(pipeline(cell.system, cell.variant).run(poisson(LOADS[cell.load], cell.qps, count, run.seed)))


def tables(cells: Mapping[Cell, list[dict[str, float]]]) -> list[str]:
    """Markdown, one table per group, system, load and rate. Times are median / P90 / P95 / P99."""
    lines: list[str] = []
    places = dict.fromkeys((cell.system, cell.load, cell.qps) for cell in cells)
    for (group, variants), (system, load, qps) in product(GROUPS.items(), places):
        lines += [f"### {group}: {load}, {qps:g} QPS, {system.name} (simulated)", ""]
        rows = [_row(name, mean(cells[Cell(system, load, qps, variant)])) for name, variant in variants.items()]
        lines += [*markdown(HEADER, rows), ""]
    return lines


def _row(name: str, cell: Mapping[str, float]) -> list[str]:
    return [
        name,
        f"{cell['requests_per_s']:.2f}",
        f"{cell['tokens_per_s']:.0f}",
        *(milliseconds(cell, time_of) for time_of in ("ttft", "tpot", "itl")),
        *(f"{cell[share]:.1%}" for share in ("busy", "waste", "reserved")),
    ]


def _record(cell: Cell, runs: list[dict[str, float]]) -> dict[str, object]:
    return {
        "simulated": True,
        "system": asdict(cell.system),
        "load": cell.load,
        "qps": "inf" if math.isinf(cell.qps) else cell.qps,
        "variant": asdict(cell.variant),
        "seeds": runs,
    }


def _window_chart(cells: Mapping[Cell, list[dict[str, float]]], system: System) -> str:
    """Tokens per second by lease window, at the highest rate."""
    rate = max(cell.qps for cell in cells)
    lines = {
        load: [
            (variant.window, mean(cells[Cell(system, load, rate, variant)])["tokens_per_s"])
            for variant in GROUPS["Lease window"].values()
        ]
        for load in LOADS
    }
    return chart(f"{system.name}, {rate:g} QPS, simulated", "lease window, steps", "output tokens/s", lines)
