"""Measures first tokens and next tokens under loads with many prompts, in virtual time, on a simulated CPU (simulated).

The scheduler's policy and the executor's slot table are the real ones. The time of a step is linear in its decodes, its
prompt tokens and the positions that they see, as on the CPUs that SmolLM2-135M was measured on.
"""

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from statistics import median
from typing import Any

import numpy as np

from pagewire.bench._common.loads import Request, prompt_of, sharegpt
from pagewire.bench._common.output import add_output, markdown, write
from pagewire.services.executor.devices.protocol import Bool, Int64
from pagewire.services.executor.steps.slot_table import SlotTable
from pagewire.services.scheduler.policy.term_limits import TermLimits
from tools.experiments.simulated_devices.virtual_time.pipeline import Host, VirtualPipeline, one_after_another

LIMITS = TermLimits(30_000, 16, 64, budget=512, window=8, max_budget=4096, max_plan_bytes=1 << 30)
HOST = Host(step=300e-6, schedule=100e-6, round_trip=1e-3, edge=4e-3, asynchronous=False)
LONGEST = 9000
"""Tokens of the longest sequence."""
SEEDS = (1, 2, 3)
HEADER = "CPU (simulated) | tokens in x out | clients x requests | TTFT ms, P50 / P99 | TPOT / ITL P99 ms | tokens/s"


@dataclass(frozen=True, slots=True)
class Cpu:
    """The seconds of a step, by what it computes."""

    step: float
    decode: float
    prompt_token: float
    position: float
    """Seconds per token and position that it sees."""

    def seconds(self, num_computed_tokens: Int64, query_lens: Int64, samples: Bool) -> float:
        """Returns the time of a step with these rows [R]."""
        decodes = query_lens == 1
        seen = float(((num_computed_tokens + query_lens / 2) * query_lens).sum())
        work = self.decode * int(decodes.sum()) + self.prompt_token * int(query_lens[~decodes].sum())
        return self.step + work + self.position * seen

    def moved(self, num_computed_tokens: Int64, query_lens: Int64, samples: Bool) -> float:
        """Returns 0: a CPU is not held against a bandwidth."""
        return 0.0


CPUS = {"fast": Cpu(3e-3, 0.6e-3, 0.3e-3, 1e-8), "slow": Cpu(4e-3, 1.5e-3, 1e-3, 2e-8)}


@dataclass(frozen=True, slots=True)
class Load:
    """Clients that each send their next request when the last has ended."""

    lengths: str
    """Tokens of each prompt and output, such as `200x60`, or `sharegpt`."""
    clients: int
    each: int
    """Requests of a client."""
    long_prompt: int = 0
    """Tokens of a further prompt, sent after five seconds; only its first token and what goes on beside it count."""


LOADS = (
    Load("200x60", 32, 2),
    Load("200x60", 32, 8),
    Load("200x60", 8, 8),
    Load("sharegpt", 32, 2),
    Load("sharegpt", 32, 8),
    Load("2000x20", 32, 2),
    Load("2000x20", 8, 8),
    Load("100x600", 31, 1, long_prompt=4000),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of a run; times are milliseconds."""

    ttft: float
    """Median time to the first token."""
    ttft_p99: float
    tpot: float
    """Median over requests of the mean time between tokens."""
    itl_p99: float
    """Time between two tokens."""
    tokens_per_s: float


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments first_tokens", description=__doc__)
    add_output(parser)
    options = parser.parse_args(arguments)
    runs = [
        {"cpu": cpu, "load": asdict(load), "seeds": [asdict(measure(CPUS[cpu], load, seed)) for seed in SEEDS]}
        for cpu, load in product(CPUS, LOADS)
    ]
    print("\n".join(table(runs)))
    cpus = {name: asdict(cpu) for name, cpu in CPUS.items()}
    write(options.output, parser.prog, arguments, simulated=True, cpus=cpus, runs=runs)
    return 0


def measure(cpu: Cpu, load: Load, seed: int) -> Figures:
    """Returns the figures of one run."""
    draw = random.Random(seed)
    requests = _requests(load, draw)
    following = one_after_another(requests[load.clients :][::-1])
    late = [Request(5.0, prompt_of(draw, load.long_prompt), 1)] if load.long_prompt else []
    VirtualPipeline(LIMITS, cpu, HOST, SlotTable, LONGEST).run(requests[: load.clients] + late, following)
    counted = late or requests
    since, until = (late[0].at, late[0].tokens_at[0]) if late else (0.0, float("inf"))
    gaps = [b - a for r in requests for a, b in pairwise(r.tokens_at) if since <= a and b <= until]
    first = [request.ttft for request in counted]
    return Figures(
        ttft=median(first) * 1e3,
        ttft_p99=float(np.percentile(first, 99)) * 1e3,
        tpot=median(float(np.mean(r.intervals)) for r in requests if r.output > 1) * 1e3,
        itl_p99=float(np.percentile(gaps, 99)) * 1e3,
        tokens_per_s=sum(r.output for r in requests) / max(r.tokens_at[-1] for r in requests),
    )


def _requests(load: Load, draw: random.Random) -> list[Request]:
    count = load.clients * load.each
    if load.lengths == "sharegpt":
        return sharegpt(draw, count)
    prompt, output = map(int, load.lengths.split("x"))
    return [Request(draw.random() * 0.01, prompt_of(draw, prompt), output) for _ in range(count)]


def table(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line per CPU and load, in Markdown: medians of the seeds."""
    rows = []
    for run in runs:
        load = Load(**run["load"])
        figures = Figures(**{name: median(seed[name] for seed in run["seeds"]) for name in run["seeds"][0]})
        beside = f", {load.long_prompt} beside" if load.long_prompt else ""
        rows.append(
            f"{run['cpu']} | {load.lengths}{beside} | {load.clients} x {load.each}"
            f" | {figures.ttft:.0f} / {figures.ttft_p99:.0f} | {figures.tpot:.0f} / {figures.itl_p99:.0f}"
            f" | {figures.tokens_per_s:.0f}"
        )
    return markdown(HEADER, rows)
