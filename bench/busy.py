"""The share of time in which the device computes: the whole stack in real time, on a simulated GPU (simulated).

Llama-3-8B on one H100 that is not there: a step takes its time, and no work. Streams of ShareGPT lengths run in a
closed loop, so that there is always work. Busy is the simulated device's own count; waiting is the time in which no
step was in flight for want of a lease or a plan.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pagewire import AsyncClient, SamplingParams
from pagewire.bench._output import json_file
from pagewire.bench._simulation.loads import sharegpt_lengths
from pagewire.bench.shapes import write_folder
from pagewire.commands.status import ask
from pagewire.embedded.stack import PIPELINE, Stack
from pagewire.shared import logs
from pagewire.shared.bus import Bus, nats
from pagewire.shared.config import Settings

SHAPE, DEVICE = "llama-3-8b", "sim:h100"
MACHINE = "llama-3-8b on one h100"
WARM_UP = 5.0
"""Seconds before anything is counted: all streams have begun."""
_VOCABULARY = 8000


@dataclass(frozen=True, slots=True)
class Run:
    """One stack."""

    window: int
    """Steps of a lease."""
    streams: int
    seconds: float
    busy_s: float
    waiting_s: float
    steps: float
    rows: float
    sampled: float


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = argparse.ArgumentParser(prog="pagewire bench busy", description=__doc__)
    parser.add_argument("--windows", type=int, nargs="+", default=[8, 1], help="lease windows, in steps")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256], help="streams at once")
    parser.add_argument("--seconds", type=float, default=20.0, help="time that is counted, per run")
    parser.add_argument("--output", type=json_file, help="JSON with every figure")
    given = parser.parse_args(arguments)
    logs.configure(Settings(log_level="warning"), service="bench")
    runs = [
        asyncio.run(measure(window, streams, given.seconds)) for streams in given.streams for window in given.windows
    ]
    print("\n".join(table(runs)))
    if given.output:
        given.output.write_text(
            json.dumps({"simulated": MACHINE, "runs": [asdict(run) for run in runs]}, indent=1) + "\n"
        )
    return 0


def table(runs: Sequence[Run]) -> list[str]:
    """Lines for the terminal."""
    head = f"{'streams':>7} {'window':>6} {'busy':>7} {'waiting':>8} {'step ms':>8} {'rows':>6} {'tokens/s':>9}"
    return [f"simulated: {MACHINE}", head] + [
        f"{run.streams:>7} {run.window:>6} {run.busy_s / run.seconds:>7.2%} {run.waiting_s / run.seconds:>8.2%}"
        f" {1e3 * run.busy_s / run.steps:>8.2f} {run.rows / run.steps:>6.1f} {run.sampled / run.seconds:>9.0f}"
        for run in runs
    ]


async def measure(window: int, streams: int, seconds: float) -> Run:
    """Runs a stack with this lease window under `streams` streams."""
    with tempfile.TemporaryDirectory() as folder:
        write_folder(SHAPE, Path(folder))
        settings = Settings(
            model=folder, device=DEVICE, nats_port=0, lease_window=window, max_num_seqs=streams, log_level="error"
        )
        async with Stack(settings, PIPELINE) as stack, asyncio.TaskGroup() as tasks:
            url = (await stack.ready()).nats
            async with AsyncClient(url) as client:
                talking = [tasks.create_task(_talk(client, random.Random(i))) for i in range(streams)]
                bus = await nats.connect(url, name="bench", inbox_prefix="_INBOX")
                try:
                    await asyncio.sleep(WARM_UP)
                    before, began = await _counters(bus), time.monotonic()
                    await asyncio.sleep(seconds)
                    after, ended = await _counters(bus), time.monotonic()
                finally:
                    await bus.close()
                    for task in talking:
                        task.cancel()
                    await asyncio.wait(talking)
    names = ("busy_s", "waiting_s", "steps", "rows", "sampled")
    return Run(window, streams, ended - began, *(after[name] - before[name] for name in names))


async def _talk(client: AsyncClient, draw: random.Random) -> None:
    """One request after another."""
    while True:
        prompt, output = draw.choice(sharegpt_lengths())
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        async for _ in client.stream(draw.choices(range(1, _VOCABULARY), k=prompt), sampling, timeout=600):
            pass


async def _counters(bus: Bus) -> dict[str, float]:
    (stats,) = await ask(bus, "executor")
    return {name[5:]: float(value) for name, value in stats.metadata.items() if name.startswith("load.")}
