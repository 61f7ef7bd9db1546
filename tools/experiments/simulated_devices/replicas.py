"""Measures what more replicas are worth in real time: all services, a real broker and simulated GPUs (simulated).

Each replica is Llama-2-70B on four simulated A100s, whose steps take their time and compute nothing. Every replica has
the same number of clients, which always have a request open. Tokens are those that the executors have sampled.
"""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pagewire import AsyncClient, SamplingParams
from pagewire.bench._common.output import add_output, markdown, write
from pagewire.shared.progress import shown
from pagewire.shared.settings.config import Settings
from pagewire.shared.telemetry import logs
from tools.experiments._common.simulated_stack import closed_loop

SHAPE, DEVICE, DEGREE = "llama-2-70b", "sim:a100-80", 4
MACHINE = "llama-2-70b on 4 x a100-80"
HEADER = "replicas (simulated) | tokens/s | of one | largest / mean load"
PROMPT = 100
"""Tokens of a prompt; no two are alike."""
OUTPUT = 256
"""Tokens of an answer."""


@dataclass(frozen=True, slots=True)
class Run:
    """The tokens of one stack."""

    replicas: int
    streams: int
    """Streams of all replicas together."""
    seconds: float
    sampled: list[float]
    """Tokens per replica."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(self.sampled) / self.seconds


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments replicas", description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8], help="replicas of each run")
    parser.add_argument("--streams", type=int, default=16, help="streams per replica")
    parser.add_argument("--seconds", type=float, default=30.0, help="time that is counted, per run")
    add_output(parser)
    options = parser.parse_args(arguments)
    logs.configure(Settings(log_level="warning"), service="bench")
    runs = [
        asyncio.run(measure(replicas, options.streams, options.seconds)) for replicas in shown(options.replicas, "runs")
    ]
    print("\n".join(table(runs)))
    write(options.output, parser.prog, arguments, simulated=MACHINE, runs=[asdict(run) for run in runs])
    return 0


def table(runs: Sequence[Run]) -> list[str]:
    """Returns a line per run, in Markdown; ratios are against the first run."""
    return markdown(
        HEADER,
        (
            f"{run.replicas} | {run.rate:.0f} | {run.rate / runs[0].rate:.2f}"
            f" | {max(run.sampled) * run.replicas / sum(run.sampled):.2f}"
            for run in runs
        ),
    )


async def measure(replicas: int, streams: int, seconds: float) -> Run:
    """Runs a stack of `replicas` replicas under `streams` streams for each."""
    settings = {"device": DEVICE, "tensor_parallel_size": DEGREE, "data_parallel_size": replicas}
    counted, executors = await closed_loop(SHAPE, _talk, replicas * streams, seconds, **settings)
    return Run(replicas, replicas * streams, counted, [executor["sampled"] for executor in executors])


async def _talk(client: AsyncClient, number: int) -> None:
    """Sends requests with prompts of their own, one after the other."""
    turn = 0
    while True:
        turn += 1
        prompt = [1 + (number * 7919 + turn * 104729 + i * i) % 8000 for i in range(PROMPT)]
        async for _ in client.stream(prompt, SamplingParams(max_tokens=OUTPUT, ignore_eos=True), timeout=600):
            pass
