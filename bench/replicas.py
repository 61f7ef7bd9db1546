"""What more replicas are worth in real time: the whole stack and a real broker, on simulated GPUs (simulated).

Each replica is Llama-2-70B on four A100s that are not there: a step takes its time, and no work. Streams run in a
closed loop, as many per replica; tokens are those that the executors have sampled.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pagewire import AsyncClient, SamplingParams
from pagewire.bench._output import json_file
from pagewire.bench.shapes import write_folder
from pagewire.commands.status import ask
from pagewire.embedded.stack import PIPELINE, Stack
from pagewire.shared import logs
from pagewire.shared.bus import Bus, nats
from pagewire.shared.config import Settings

SHAPE, DEVICE, DEGREE = "llama-2-70b", "sim:a100-80", 4
MACHINE = "llama-2-70b on 4 x a100-80"
PROMPT = 100
"""Tokens of a prompt; no two are alike."""
OUTPUT = 256
"""Tokens of an answer."""
WARM_UP = 5.0
"""Seconds before anything is counted."""


@dataclass(frozen=True, slots=True)
class Run:
    """One stack."""

    replicas: int
    streams: int
    """In all."""
    seconds: float
    sampled: list[float]
    """Tokens per replica."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(self.sampled) / self.seconds


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = argparse.ArgumentParser(prog="pagewire bench replicas", description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8], help="replicas of each run")
    parser.add_argument("--streams", type=int, default=16, help="streams per replica")
    parser.add_argument("--seconds", type=float, default=30.0, help="time that is counted, per run")
    parser.add_argument("--output", type=json_file, help="JSON with every figure")
    given = parser.parse_args(arguments)
    logs.configure(Settings(log_level="warning"), service="bench")
    runs = [asyncio.run(measure(replicas, given.streams, given.seconds)) for replicas in given.replicas]
    print("\n".join(table(runs)))
    if given.output:
        record = {"simulated": MACHINE, "runs": [asdict(run) for run in runs]}
        given.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def table(runs: Sequence[Run]) -> list[str]:
    """Lines for the terminal; factors are against the first run."""
    lines = [f"simulated: {MACHINE} each", f"{'replicas':>8} {'tokens/s':>9} {'factor':>7} {'largest/mean':>13}"]
    for run in runs:
        largest = max(run.sampled) * run.replicas / sum(run.sampled)
        lines.append(f"{run.replicas:>8} {run.rate:>9.0f} {run.rate / runs[0].rate:>7.2f} {largest:>13.2f}")
    return lines


async def measure(replicas: int, streams: int, seconds: float) -> Run:
    """Runs a stack of `replicas` replicas under `streams` streams for each."""
    with tempfile.TemporaryDirectory() as folder:
        write_folder(SHAPE, Path(folder))
        settings = Settings(
            model=folder,
            device=DEVICE,
            tensor_parallel_size=DEGREE,
            data_parallel_size=replicas,
            nats_port=0,
            log_level="error",
        )
        async with Stack(settings, PIPELINE) as stack, asyncio.TaskGroup() as tasks:
            url = (await stack.ready()).nats
            async with AsyncClient(url) as client:
                talking = [tasks.create_task(_talk(client, i)) for i in range(replicas * streams)]
                bus = await nats.connect(url, name="bench", inbox_prefix="_INBOX")
                try:
                    await asyncio.sleep(WARM_UP)
                    before, began = await _sampled(bus), time.monotonic()
                    await asyncio.sleep(seconds)
                    after, ended = await _sampled(bus), time.monotonic()
                finally:
                    await bus.close()
                    for task in talking:
                        task.cancel()
                    await asyncio.wait(talking)
    return Run(replicas, replicas * streams, ended - began, [after[name] - before[name] for name in after])


async def _talk(client: AsyncClient, number: int) -> None:
    """One stream after another."""
    turn = 0
    while True:
        turn += 1
        prompt = [1 + (number * 7919 + turn * 104729 + i * i) % 8000 for i in range(PROMPT)]
        async for _ in client.stream(prompt, SamplingParams(max_tokens=OUTPUT, ignore_eos=True), timeout=600):
            pass


async def _sampled(bus: Bus) -> dict[str, float]:
    """Tokens that each executor has sampled so far."""
    return {stats.id: float(stats.metadata["load.sampled"]) for stats in await ask(bus, "executor")}
