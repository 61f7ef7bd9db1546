"""Measures what the lease window costs and gains: first tokens of arrivals, and time in which the executor waits.

For each window a stack of its own decodes 16 streams of the bundled model without a pause. Requests arrive one after
the other; the time to their first token is taken at the client. Windows take turns, so that noise reaches all of them.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field

from pagewire import AsyncClient, SamplingParams
from pagewire.bench._common.output import add_output, markdown, spread, write
from pagewire.bench._common.stack import counters
from pagewire.embedded.programs import PIPELINE
from pagewire.embedded.stack import Stack
from pagewire.shared.errors import PagewireError
from pagewire.shared.settings.config import Settings
from pagewire.shared.telemetry import logs

PROMPT = "The old man looked at the sea, and the boy asked him"
HEADER = "window | first token ms, median | of the first (quartiles) | waiting | tokens/s"
BACKGROUND = "Once upon a time there was a little rabbit who lived in a wood"


@dataclass
class Run:
    """Figures of one window."""

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
        """Median milliseconds to the first token."""
        return statistics.median(self.first_token_ms)


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments lease", description=__doc__)
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 2, 8], help="lease windows, in steps")
    parser.add_argument("--streams", type=int, default=16, help="streams that decode all the time")
    parser.add_argument("--samples", type=int, default=50, help="arrivals per window")
    parser.add_argument("--rounds", type=int, default=5, help="turns in which the samples are taken")
    parser.add_argument("--model", default="bundled", help="folder; the bundled model by default")
    add_output(parser)
    options = parser.parse_args(arguments)
    logs.configure(Settings(log_level="warning"), service="bench")
    runs = asyncio.run(_measure(options))
    print("\n".join(table(runs)))
    write(options.output, parser.prog, arguments, runs=[asdict(run) for run in runs])
    return 0


def table(runs: Sequence[Run]) -> list[str]:
    """Returns a line per window, in Markdown; ratios are against the median of the first window."""
    first = runs[0].median_ms
    return markdown(
        HEADER,
        (
            f"{run.window} | {run.median_ms:.2f}"
            f" | {spread(run.median_ms / first, [ms / first for ms in statistics.quantiles(run.first_token_ms)])}"
            f" | {run.waiting:.2%} | {run.sampled / run.wall_s:.0f}"
            for run in runs
        ),
    )


async def _measure(options: argparse.Namespace) -> list[Run]:
    runs = [Run(window) for window in options.windows]
    for _ in range(options.rounds):
        for run in runs:
            settings = Settings(model=options.model, nats_port=0, lease_window=run.window, log_level="warning")
            async with Stack(settings, PIPELINE) as stack:
                address = await stack.ready()
                await _round(run, address.nats, options.streams, options.samples // options.rounds)
    return runs


async def _round(run: Run, url: str, streams: int, samples: int) -> None:
    """Takes the arrivals of one turn while `streams` streams decode, and the executor's counters around them."""
    async with AsyncClient(url) as client, _decoding(client, streams):
        (before,), began = await counters(url), time.monotonic()
        for _ in range(samples):
            run.first_token_ms.append(await _first_token(client))
        (after,), ended = await counters(url), time.monotonic()
    run.wall_s += ended - began
    for name in ("waiting_s", "busy_s", "sampled"):
        setattr(run, name, getattr(run, name) + after[name] - before[name])


@asynccontextmanager
async def _decoding(client: AsyncClient, streams: int) -> AsyncIterator[None]:
    """Keeps `streams` streams decoding while the block runs, which begins once all have their first token."""
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
    """Returns the milliseconds from sending a request to its first token."""
    sent = time.perf_counter()
    async for _ in client.stream(PROMPT, SamplingParams(max_tokens=1, ignore_eos=True)):
        return (time.perf_counter() - sent) * 1e3
    raise RuntimeError("the stream had no token")
