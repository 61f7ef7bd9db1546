"""Measures one model on several GPUs: all services in real time, on simulated GPUs that share a model (simulated).

Llama-3-70B on four simulated H100, whose steps take their time and compute nothing. Clients with ShareGPT lengths
always have a request open. The time of collectives is that of two sums over the GPUs per layer.
"""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.bench._common.output import markdown
from pagewire.bench.shapes import SHAPES
from pagewire.services.executor.devices.sim.roofline import GPUS, Roofline, shape_of
from pagewire.shared.progress import shown
from pagewire.shared.settings.config import Settings
from pagewire.shared.telemetry import logs
from tools.experiments._common.simulated_stack import closed_loop
from tools.experiments.simulated_devices.busy import talk

SHAPE, GPU, RANKS = "llama-3-70b", "h100", 4
HEADER = "streams (simulated) | busy | of it in collectives | rows of a step | ms of a step | tokens/s"


@dataclass(frozen=True, slots=True)
class Run:
    """The counters of one stack."""

    streams: int
    seconds: float
    busy_s: float
    collectives_s: float
    steps: float
    rows: float
    sampled: float


def main(arguments: list[str]) -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments several_gpus", description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256], help="streams at once")
    parser.add_argument("--seconds", type=float, default=30.0, help="time that is counted, per run")
    options = parser.parse_args(arguments)
    logs.configure(Settings(log_level="warning"), service="bench")
    runs = [asyncio.run(measure(streams, options.seconds)) for streams in shown(options.streams, "runs")]
    print("\n".join(table(runs)))
    return 0


def table(runs: Sequence[Run]) -> list[str]:
    """Returns a line per run, in Markdown."""
    return markdown(
        HEADER,
        (
            f"{run.streams} | {run.busy_s / run.seconds:.2%} | {run.collectives_s / run.busy_s:.1%}"
            f" | {run.rows / run.steps:.0f} | {run.busy_s / run.steps * 1e3:.1f} | {run.sampled / run.seconds:.0f}"
            for run in runs
        ),
    )


async def measure(streams: int, seconds: float) -> Run:
    """Runs a stack under so many streams."""
    settings = {"device": f"sim:{GPU}", "tensor_parallel_size": RANKS, "max_num_seqs": streams}
    counted, (executor,) = await closed_loop(SHAPE, talk, streams, seconds, **settings)
    roofline = Roofline(shape_of(SHAPES[SHAPE]), GPUS[GPU], RANKS)
    each_step = roofline.collectives(0)  # the rest of their time grows with the tokens
    tokens = roofline.collectives(int(executor["tokens"])) - each_step
    steps = executor["steps"]
    return Run(
        streams, counted, executor["busy_s"], steps * each_step + tokens, steps, executor["rows"], executor["sampled"]
    )
