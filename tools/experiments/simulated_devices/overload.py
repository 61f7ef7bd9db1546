"""Measures an overload: many times as many requests as a simulated GPU can serve, with a limit on the wait (simulated).

Llama-3-8B on one simulated L40S, whose steps take their time and compute nothing. First as many clients as there are
slots always have a request open: the loaded steady state, whose rate is the capacity. Then requests arrive at random
times, `--factor` times as many as the capacity, whatever becomes of them. What a refused client is
told is compared with the wait that it would have had: until the next request that was admitted had its first token.
"""

import argparse
import asyncio
import random
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pagewire import AsyncClient, SamplingParams
from pagewire.bench._common.output import add_output, markdown, write
from pagewire.bench._common.stack import resident_bytes
from pagewire.bench.shapes import write_folder
from pagewire.embedded.programs import PIPELINE
from pagewire.embedded.stack import Stack
from pagewire.shared.errors import DeadlineExceeded, Overloaded, PagewireError
from pagewire.shared.settings.config import Settings
from pagewire.shared.telemetry import logs

SHAPE, DEVICE = "llama-3-8b", "sim:l40s"
MACHINE = "llama-3-8b on l40s"
PROMPT = 64
"""Tokens of a prompt; no two are alike."""
OUTPUTS = (200, 720)
"""Shortest and longest answer in tokens; all between are equally likely."""
SAMPLES = 10
"""Intervals between two checks of the memory."""
TIMEOUT = 60.0
"""Seconds until a request's deadline."""


@dataclass
class Sent:
    """One request of the overload. Times are seconds since its beginning."""

    at: float
    first: float | None = None
    """Seconds until its first token came."""
    ended: float | None = None
    """Seconds until its last token came."""
    refused: float | None = None
    """Seconds until the refusal came."""
    retry_after: float = 0.0
    """Seconds after which the refused client should come back."""
    error: str = ""
    """Kind of any other error."""


@dataclass
class Figures:
    """Results of one run."""

    factor: float
    seconds: float
    max_queue_wait: str
    steady: list[float]
    """Seconds from request to last token in the steady state."""
    capacity: float
    """Requests per second in the steady state."""
    offered: int
    """Requests that were sent."""
    latencies: list[float]
    """Seconds from request to last token of those that ended well."""
    waits: list[float]
    """Seconds from request to first token of those that were admitted."""
    refusals_ms: list[float]
    """Milliseconds from request to refusal."""
    ratios: list[float]
    """`retry_after` of each refused client / the wait that it would have had."""
    errors: dict[str, int]
    """Number of other errors by kind."""
    memory: dict[str, list[float]]
    """MiB of each process at equal intervals, from before the overload to its end."""
    probe: float
    """Seconds from the end of the overload until a request that is sent then has its answer."""


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments overload", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="duration of the overload")
    parser.add_argument("--steady", type=float, default=60.0, help="duration of the steady state before it")
    parser.add_argument("--factor", type=float, default=10.0, help="offered requests, as a multiple of the capacity")
    parser.add_argument("--streams", type=int, default=64, help="slots")
    parser.add_argument("--max-queue-wait", default="10s", help="the setting; none: it is left out")
    add_output(parser)
    options = parser.parse_args(arguments)
    logs.configure(Settings(log_level="warning"), service="bench")
    run = asyncio.run(measure(options.streams, options.steady, options.factor, options.seconds, options.max_queue_wait))
    print("\n".join(table(run)))
    write(options.output, parser.prog, arguments, simulated=MACHINE, runs=[asdict(run)])
    return 0


def table(run: Figures) -> list[str]:
    """Returns a line per figure, in Markdown."""
    errors = dict(run.errors)
    expired = errors.pop(DeadlineExceeded.kind, 0)
    right = sum(0.5 <= ratio <= 2 for ratio in run.ratios) / max(1, len(run.ratios))
    slower = _percentile(run.latencies, 99) / _percentile(run.steady, 99)
    rows = [
        f"capacity, requests/s | {run.capacity:.2f}",
        f"offered, requests/s | {run.offered / run.seconds:.1f}",
        f"steady state, s to the end P50 / P99 | {_pair(run.steady)}",
        f"admitted | {len(run.latencies)}",
        f"admitted, s to the end P50 / P99 | {_pair(run.latencies)}",
        f"admitted P99 / steady P99 | {slower:.2f}",
        f"admitted, s to the first token P50 / P99 | {_pair(run.waits)}",
        f"refused with 429 | {len(run.refusals_ms)}",
        f"refused, ms to the refusal P50 / P99 | {_pair(run.refusals_ms)}",
        f"retry_after told / wait P1 / P50 / P99 | {_spread(run.ratios)}",
        f"retry_after within a factor of 2 | {100 * right:.1f}%",
        f"expired with 408 | {expired}",
        f"other errors | {', '.join(f'{count} {kind}' for kind, count in errors.items()) or 'none'}",
        f"s until a probe is answered | {run.probe:.1f}",
        *(f"MiB of {name} | {_memory(sizes)}" for name, sizes in run.memory.items()),
    ]
    head = f"simulated, {run.factor:g} times the capacity for {run.seconds:.0f} s, max-queue-wait {run.max_queue_wait}"
    return markdown(f"{head} | ", rows)


def summary(run: Figures) -> list[str]:
    """Returns a table of one line for the page of all benchmarks."""
    header = "simulated | admitted, P99 against steady | refused | retry_after told / wait, P1–P99 | expired | probe, s"
    slower = _percentile(run.latencies, 99) / _percentile(run.steady, 99)
    ratios = f"{_percentile(run.ratios, 1):.2f}–{_percentile(run.ratios, 99):.2f}"
    expired = run.errors.get(DeadlineExceeded.kind, 0)
    row = f"{len(run.latencies)}, {slower:.2f} | {len(run.refusals_ms)} | {ratios} | {expired} | {run.probe:.1f}"
    return markdown(header, [f"{run.factor:g}x for {run.seconds:.0f} s | {row}"])


async def measure(streams: int, steady: float, factor: float, seconds: float, max_queue_wait: str) -> Figures:
    """Runs a stack: first the steady state, then the overload."""
    with tempfile.TemporaryDirectory() as folder:
        write_folder(SHAPE, Path(folder))
        settings = Settings(
            model=folder,
            device=DEVICE,
            max_num_seqs=streams,
            nats_port=0,
            max_queue_wait=None if max_queue_wait == "none" else max_queue_wait,
            log_level="error",
        )
        async with Stack(settings, PIPELINE) as stack:
            url = (await stack.ready()).nats
            async with AsyncClient(url) as client:
                latencies, capacity = await _steady_state(client, streams, steady)
                sent, memory, probe = await _overload(client, factor * capacity, seconds)
    return Figures(
        factor,
        seconds,
        max_queue_wait,
        _rounded(latencies),
        capacity,
        len(sent),
        latencies=_rounded(each.ended - each.at for each in sent if each.ended is not None),
        waits=_rounded(each.first - each.at for each in sent if each.first is not None),
        refusals_ms=_rounded(1000 * (each.refused - each.at) for each in sent if each.refused is not None),
        ratios=_rounded(ratios(sent)),
        errors=Counter(each.error for each in sent if each.error),
        memory=memory,
        probe=probe,
    )


def ratios(sent: Sequence[Sent]) -> Iterator[float]:
    """Yields the time told to each refused client / the wait that it would have had.

    That wait is over when the request that was admitted next has its first token. Without such a request it is unknown.
    """
    admitted = [(each.at, each.first) for each in sent if each.first is not None]
    for each in sent:
        following = bisect_left(admitted, (each.at, 0.0))
        if each.refused is not None and following < len(admitted):
            yield each.retry_after / (admitted[following][1] - each.at)


async def _steady_state(client: AsyncClient, streams: int, seconds: float) -> tuple[list[float], float]:
    """Returns the latencies of the requests that end within the second half of the time, and how many per second."""
    ends: list[tuple[float, float]] = []

    async def talk(number: int) -> None:
        chance = random.Random(number)
        while True:
            sent = time.monotonic()
            await client.generate(_prompt(chance), _sampling(chance), timeout=600)
            ends.append((time.monotonic(), time.monotonic() - sent))

    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        talking = [tasks.create_task(talk(number)) for number in range(streams)]
        await asyncio.sleep(seconds)
        for task in talking:
            task.cancel()
    counted = [latency for at, latency in ends if at > began + seconds / 2]
    return counted, len(counted) / (seconds / 2)


async def _overload(
    client: AsyncClient, rate: float, seconds: float
) -> tuple[list[Sent], dict[str, list[float]], float]:
    """Sends `rate` requests per second at random times, then the probe.

    Returns the requests, the memory of each process, and the seconds that the probe took.
    """
    chance = random.Random(0)
    requests: list[Sent] = []
    began = time.monotonic()
    sizes = [resident_bytes()]

    async def send(sent: Sent, prompt: list[int], sampling: SamplingParams) -> None:
        try:
            async for _ in client.stream(prompt, sampling, timeout=TIMEOUT).batches():
                sent.first = sent.first or time.monotonic() - began
            sent.ended = time.monotonic() - began
        except Overloaded as error:
            sent.refused = time.monotonic() - began
            sent.retry_after = (error.retry_after_ms or 0) / 1000
        except PagewireError as error:
            sent.error = getattr(error, "kind", type(error).__name__)

    async with asyncio.TaskGroup() as tasks:
        due = 0.0
        while (due := due + chance.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, began + due - time.monotonic()))
            if due > len(sizes) * seconds / SAMPLES:
                sizes.append(resident_bytes())
            requests.append(Sent(time.monotonic() - began))
            tasks.create_task(send(requests[-1], _prompt(chance), _sampling(chance)))
        sizes.append(resident_bytes())
        probe = await _probe(client, chance)
    memory = {name: _rounded(size[name] / 2**20 for size in sizes if name in size) for name in sizes[0]}
    return requests, memory, probe


async def _probe(client: AsyncClient, chance: random.Random) -> float:
    """Returns the seconds until a short request has its answer. It comes back when it is told to."""
    began = time.monotonic()
    while True:
        try:
            await client.generate(_prompt(chance), max_tokens=1, timeout=TIMEOUT)
        except Overloaded as error:
            await asyncio.sleep((error.retry_after_ms or 0) / 1000)
        else:
            return time.monotonic() - began


def _prompt(chance: random.Random) -> list[int]:
    return [chance.randrange(1, 8000) for _ in range(PROMPT)]


def _sampling(chance: random.Random) -> SamplingParams:
    return SamplingParams(max_tokens=chance.randint(*OUTPUTS), ignore_eos=True)


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 3) for value in values]


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else float("nan")


def _pair(values: Sequence[float]) -> str:
    return f"{_percentile(values, 50):.1f} / {_percentile(values, 99):.1f}"


def _spread(values: Sequence[float]) -> str:
    return " / ".join(f"{_percentile(values, percent):.2f}" for percent in (1, 50, 99))


def _memory(sizes: Sequence[float]) -> str:
    return " → ".join(f"{size:.0f}" for size in (sizes[0], sizes[len(sizes) // 2], sizes[-1]))
