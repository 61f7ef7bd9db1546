"""Measures the share of time in which the device computes: all services in real time, on a simulated GPU (simulated).

The simulated H100 takes the time of Llama-3-8B's steps and computes nothing. Clients with ShareGPT lengths always have
a request open, so there is always work. Busy is the time in which a simulated step ran, waiting the time in which no
step was in flight because no lease or plan had come.
"""

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pagewire import AsyncClient, SamplingParams
from pagewire.bench._common.loads import sharegpt_lengths
from pagewire.bench._common.output import add_output, markdown, write
from pagewire.shared.progress import shown
from pagewire.shared.settings.config import Settings
from pagewire.shared.telemetry import logs
from tools.experiments._common.simulated_stack import closed_loop

SHAPE, DEVICE = "llama-3-8b", "sim:h100"
MACHINE = "llama-3-8b on one h100"
HEADER = "streams (simulated) | window | busy | waiting | tokens/s"
_VOCABULARY = 8000


@dataclass(frozen=True, slots=True)
class Run:
    """The counters of one stack."""

    window: int
    """Steps of a lease."""
    streams: int
    seconds: float
    busy_s: float
    waiting_s: float
    steps: float
    rows: float
    sampled: float

    @property
    def busy(self) -> float:
        """Share of the counted time in which the device ran a step."""
        return self.busy_s / self.seconds


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments busy", description=__doc__)
    parser.add_argument("--windows", type=int, nargs="+", default=[8, 1], help="lease windows, in steps")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256], help="streams at once")
    parser.add_argument("--seconds", type=float, default=20.0, help="time that is counted, per run")
    add_output(parser)
    options = parser.parse_args(arguments)
    logs.configure(Settings(log_level="warning"), service="bench")
    pairs = [(window, streams) for streams in options.streams for window in options.windows]
    runs = [asyncio.run(measure(*pair, options.seconds)) for pair in shown(pairs, "runs")]
    print("\n".join(table(runs)))
    write(options.output, parser.prog, arguments, simulated=MACHINE, runs=[asdict(run) for run in runs])
    return 0


def table(runs: Sequence[Run]) -> list[str]:
    """Returns a line per run, in Markdown."""
    return markdown(
        HEADER,
        (
            f"{run.streams} | {run.window} | {run.busy:.2%} | {run.waiting_s / run.seconds:.2%}"
            f" | {run.sampled / run.seconds:.0f}"
            for run in runs
        ),
    )


async def measure(window: int, streams: int, seconds: float) -> Run:
    """Runs a stack with this lease window under `streams` streams."""
    settings = {"device": DEVICE, "lease_window": window, "max_num_seqs": streams}
    counted, (executor,) = await closed_loop(SHAPE, talk, streams, seconds, **settings)
    names = ("busy_s", "waiting_s", "steps", "rows", "sampled")
    return Run(window, streams, counted, *(executor[name] for name in names))


async def talk(client: AsyncClient, number: int) -> None:
    """Sends requests with ShareGPT lengths, one after the other."""
    draw = random.Random(number)
    while True:
        prompt, output = draw.choice(sharegpt_lengths())
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        async for _ in client.stream(draw.choices(range(1, _VOCABULARY), k=prompt), sampling, timeout=600):
            pass
