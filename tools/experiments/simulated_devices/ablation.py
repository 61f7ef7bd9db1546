"""Measures what each part of the scheduler is worth: one setting at a time is changed, in virtual time (simulated).

The scheduler's policy and the executor's slot table are the real ones; step times of the GPUs come from a roofline.
Every figure is simulated, and the mean of three seeds.
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import product
from typing import Any, NamedTuple

from pagewire.bench._common.loads import LOADS, poisson
from pagewire.bench._common.output import add_output, markdown, spread, write
from tools.experiments._common.chart import chart
from tools.experiments.simulated_devices.virtual_time.figures import figures, mean
from tools.experiments.simulated_devices.virtual_time.systems import System, Variant, pipeline

SYSTEMS = (System("llama-3-8b", "h100", 1, 8192), System("llama-3-70b", "h100", 4, 8192))
BASE = Variant()
WINDOWS = {steps: Variant(window=steps) for steps in (1, 2, 4, 8, 16)}
BLOCK_SIZES = {tokens: Variant(block_size=tokens) for tokens in (1, 16, 64, 256)}
SHOWN_SIZES = (16, 64)
PARTS = {
    "waste": "",
    "waste_running": ", of it in the step that runs",
    "waste_queued": ", of it in steps behind it",
}
"""Figures of the wasted memory, and what a row adds to its block size."""
CHANGES: Mapping[str, Variant] = {
    **{f"lease window {steps}": variant for steps, variant in WINDOWS.items()},
    "whole prompts first": Variant(splitfuse=False),
    "synchronous output": Variant(asynchronous=False),
    "no prefix cache": Variant(prefix_cache=False),
    **{f"block size {tokens}": variant for tokens, variant in BLOCK_SIZES.items()},
}
"""One setting each. The windows and block sizes include those of `BASE`."""
SEEDS = (0, 1, 2)


class Cell(NamedTuple):
    """One place of the tables."""

    system: System
    load: str
    qps: float
    variant: Variant


Cells = Mapping[Cell, list[dict[str, float]]]
"""Figures, one set per seed."""


class Run(NamedTuple):
    """A cell's run with one seed."""

    cell: Cell
    seed: int
    requests: int


def main(arguments: list[str]) -> int:
    """Prints the tables and writes `--output`."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments ablation", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer requests and rates: under 5 minutes on 2 cores")
    parser.add_argument("--requests", type=int, default=250, help="requests per run")
    parser.add_argument("--qps", type=float, nargs="+", default=[2, 8, 32, math.inf], help="arrival rates")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    add_output(parser)
    options = parser.parse_args(arguments)
    if options.quick:
        options.requests, options.qps = 60, [8, math.inf]
    began = time.monotonic()
    cells = measure(options.qps, options.requests, options.jobs)
    print(f"Simulated, {options.requests} requests per run, seeds {SEEDS}.")
    for system in SYSTEMS:
        print("\n".join(["", f"### {system.name}", "", *changes(cells, system, CHANGES)]))
        for load in LOADS:
            print("\n".join(["", f"### KV memory, {load}, {system.name}", "", *waste(cells, system, load)]))
    print(f"{len(cells) * len(SEEDS)} runs in {time.monotonic() - began:.0f} s")
    write(options.output, parser.prog, arguments, simulated=True, runs=[_record(c, runs) for c, runs in cells.items()])
    return 0


def measure(rates: Sequence[float], requests: int, jobs: int | None) -> Cells:
    """Returns the figures of every cell, one set per seed."""
    cells = [Cell(*parts) for parts in product(SYSTEMS, LOADS, rates, dict.fromkeys(CHANGES.values()))]
    runs = [Run(cell, seed, requests) for cell in cells for seed in SEEDS]
    with ProcessPoolExecutor(jobs) as pool:
        results = iter(pool.map(simulate, runs, chunksize=len(SEEDS)))
        return {cell: [next(results) for _ in SEEDS] for cell in cells}


def simulate(run: Run) -> dict[str, float]:
    """Returns the figures of one run. A slow rate sends no more than a minute's requests."""
    cell = run.cell
    count = run.requests if math.isinf(cell.qps) else min(run.requests, max(60, round(60 * cell.qps)))
    return figures(pipeline(cell.system, cell.variant).run(poisson(LOADS[cell.load], cell.qps, count, run.seed)))


def changes(cells: Cells, system: System, names: Iterable[str]) -> list[str]:
    """Returns a table of some of `CHANGES` against `BASE`, at the highest arrival rate."""
    rate = max(cell.qps for cell in cells)
    rows = []
    for name in names:
        ratios, intervals = [], []
        for load in LOADS:
            ours, base = cells[Cell(system, load, rate, CHANGES[name])], cells[Cell(system, load, rate, BASE)]
            rates = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(ours, base, strict=True)]
            ratios.append(spread(mean(ours)["tokens_per_s"] / mean(base)["tokens_per_s"], rates))
            intervals.append(f"{mean(ours)['itl_p99'] / mean(base)['itl_p99']:.2f}")
        rows.append(" | ".join([name, *ratios, " / ".join(intervals)]))
    return markdown(" | ".join(["simulated", *(f"tokens/s, {load}" for load in LOADS), "P99 ITL of each"]), rows)


def waste(cells: Cells, system: System, load: str) -> list[str]:
    """Returns a table of the share of the allocated KV memory that holds nothing, by block size and arrival rate.

    Two rows behind each share say what of it steps in flight fill.
    """
    rates = sorted({cell.qps for cell in cells})
    rows = []
    for size, variant in BLOCK_SIZES.items():
        if size not in SHOWN_SIZES:
            continue
        for part, name in PARTS.items():
            samples = [[run[part] * 100 for run in cells[Cell(system, load, qps, variant)]] for qps in rates]
            cells_of = (spread(statistics.fmean(shares), shares) for shares in samples)
            rows.append(" | ".join([f"block size {size}{name}", *cells_of]))
    return markdown(" | ".join(["waste, % (simulated)", *(f"{qps:g}/s" for qps in rates)]), rows)


def window_chart(cells: Cells, system: System) -> str:
    """Draws tokens per second by lease window, at the highest rate."""
    rate = max(cell.qps for cell in cells)
    lines = {
        load: [
            (variant.window, mean(cells[Cell(system, load, rate, variant)])["tokens_per_s"])
            for variant in WINDOWS.values()
        ]
        for load in LOADS
    }
    return chart(f"{system.name}, {rate:g} QPS, simulated", "lease window, steps", "output tokens/s", lines)


def _record(cell: Cell, runs: list[dict[str, float]]) -> dict[str, object]:
    return {
        "system": asdict(cell.system),
        "load": cell.load,
        "qps": "inf" if math.isinf(cell.qps) else cell.qps,
        "variant": asdict(cell.variant),
        "seeds": runs,
    }


def read(records: Iterable[Mapping[str, Any]]) -> Cells:
    """Returns the cells of raw results."""
    return {
        Cell(System(**run["system"]), run["load"], float(run["qps"]), Variant(**run["variant"])): run["seeds"]
        for run in records
    }
