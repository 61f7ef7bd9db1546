"""What the lease window costs and gains: first tokens of arrivals, and time in which the executor waits.

For each window a stack of its own decodes 16 streams without a pause. Requests arrive one after the other; the time to
their first token is taken at the client. Windows take turns, so that a noisy machine is noisy for all of them.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field

from pagewire import AsyncClient, SamplingParams
from pagewire.bench._output import json_file
from pagewire.commands.status import ask
from pagewire.embedded.stack import PIPELINE, Stack
from pagewire.shared import logs
from pagewire.shared.bus import Bus, nats
from pagewire.shared.config import Settings
from pagewire.shared.errors import PagewireError

PROMPT = "The old man looked at the sea, and the boy asked him"
BACKGROUND = "Once upon a time there was a little rabbit who lived in a wood"


@dataclass
class Run:
    """What was measured with one window."""

    window: int
    first_token_ms: list[float] = field(default_factory=list)
    waiting_s: float = 0.0
    busy_s: float = 0.0
    wall_s: float = 0.0
    sampled: float = 0.0

    @property
    def waiting(self) -> float:
        """Share of the time in which the executor had work, and waited for a lease or a plan."""
        return self.waiting_s / self.wall_s

    @property
    def median_ms(self) -> float:
        """Median time to the first token."""
        return statistics.median(self.first_token_ms)


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = argparse.ArgumentParser(prog="pagewire bench lease", description=__doc__)
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 2, 8], help="lease windows, in steps")
    parser.add_argument("--streams", type=int, default=16, help="streams that decode all the time")
    parser.add_argument("--samples", type=int, default=50, help="arrivals per window")
    parser.add_argument("--rounds", type=int, default=5, help="turns in which the samples are taken")
    parser.add_argument("--model", default="bundled", help="folder; the bundled model by default")
    parser.add_argument("--output", type=json_file, help="JSON with every figure")
    given = parser.parse_args(arguments)
    logs.configure(Settings(log_level="warning"), service="bench")
    runs = asyncio.run(_measure(given))
    print("\n".join(table(runs)))
    if given.output:
        given.output.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
    return 0


def table(runs: list[Run]) -> list[str]:
    """Lines for the terminal; ratios are against the first window."""
    lines = [f"{'window':>6} {'first token ms':>15} {'ratio':>6} {'waiting':>8} {'busy':>6} {'tokens/s':>9}"]
    lines += [
        f"{run.window:>6} {run.median_ms:>15.2f} {run.median_ms / runs[0].median_ms:>6.2f} {run.waiting:>8.2%}"
        f" {run.busy_s / run.wall_s:>6.1%} {run.sampled / run.wall_s:>9.0f}"
        for run in runs
    ]
    return lines


async def _measure(given: argparse.Namespace) -> list[Run]:
    runs = [Run(window) for window in given.windows]
    for _ in range(given.rounds):
        for run in runs:
            settings = Settings(model=given.model, nats_port=0, lease_window=run.window, log_level="warning")
            async with Stack(settings, PIPELINE) as stack:
                address = await stack.ready()
                await _round(run, address.nats, given.streams, given.samples // given.rounds)
    return runs


async def _round(run: Run, url: str, streams: int, samples: int) -> None:
    """One turn of one window: background first, then the arrivals, with the executor's counters around them."""
    bus = await nats.connect(url, name="bench", inbox_prefix="_INBOX")
    try:
        async with AsyncClient(url) as client, _decoding(client, streams):
            before, began = await _counters(bus), time.monotonic()
            for _ in range(samples):
                run.first_token_ms.append(await _first_token(client))
            after, ended = await _counters(bus), time.monotonic()
    finally:
        await bus.close()
    run.wall_s += ended - began
    for name in ("waiting_s", "busy_s", "sampled"):
        setattr(run, name, getattr(run, name) + after[name] - before[name])


@asynccontextmanager
async def _decoding(client: AsyncClient, streams: int) -> AsyncIterator[None]:
    """`streams` streams that decode for as long as the block runs; it begins once all have their first token."""
    started = asyncio.Barrier(streams + 1)

    async def decode(seed: int) -> None:
        waited = False
        while True:
            sampling = SamplingParams(max_tokens=1800, ignore_eos=True, seed=seed)
            async for _ in client.stream(BACKGROUND, sampling, timeout=600):
                if not waited:
                    waited = True
                    await started.wait()

    tasks = [asyncio.create_task(decode(i)) for i in range(streams)]
    try:
        await started.wait()
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, PagewireError):
                raise error


async def _first_token(client: AsyncClient) -> float:
    """Milliseconds from sending a request to its first token."""
    sent = time.perf_counter()
    async for _ in client.stream(PROMPT, SamplingParams(max_tokens=1, ignore_eos=True)):
        return (time.perf_counter() - sent) * 1e3
    raise RuntimeError("the stream had no token")


async def _counters(bus: Bus) -> dict[str, float]:
    (stats,) = await ask(bus, "executor")
    return {name[5:]: float(value) for name, value in stats.metadata.items() if name.startswith("load.")}
