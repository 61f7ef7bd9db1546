"""Loads a running server over HTTP and measures what its clients see, with vLLM's definitions.

TTFT: from the sending of a request to its first chunk with text. ITL: between two such chunks. TPOT: from the first to
the last one, per token behind the first. E2EL: to the end of the answer. Requests arrive by a Poisson process
(burstiness 1), in bursts (below 1) or evenly (above), or all at once. Goodput counts those that meet all given limits.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import chain
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tqdm import tqdm

from pagewire.bench._common.event_stream import post
from pagewire.bench._common.output import add_output, markdown, write
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.settings.flags import Parser

WORDS = "the of and to in is it that was for on are with as be at one have this from by hot word but what some".split()  # noqa: SIM905
"""Prompts are drawn from these: most tokenizers have a token for each."""
PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
GOALS = ("ttft", "tpot", "e2el")
READY_WITHIN = 120.0
"""Seconds within which all client processes must have started."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server that is loaded, and the fields that all requests share."""

    url: str
    backend: str
    """Key of `PATHS`."""
    model: str
    api_key: str = ""
    ignore_eos: bool = True


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request that is sent."""

    text: str
    max_tokens: int
    at: float = 0.0
    """Seconds from the start until it arrives."""


@dataclass(slots=True)
class Record:
    """Observations of the client of one request. Times are seconds from its sending."""

    sent: float
    """Seconds from the start."""
    chunks: list[float] = field(default_factory=list)
    """Seconds until each chunk with text came."""
    ended: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.chunks[0] if self.chunks else self.ended

    @property
    def tpot(self) -> float | None:
        """Time per token behind the first; None if there is none."""
        return (self.ended - self.ttft) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Times between chunks."""
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`; exit code 1 if a request has failed."""
    parser = Parser(prog="pagewire bench serve", description=__doc__)
    parser.add_argument("--url", "--base-url", default="http://127.0.0.1:8000", help="of the server")
    parser.add_argument("--backend", choices=sorted(PATHS), default="openai", help="the route")
    parser.add_argument("--model", default="", help="the served name; by default the first that the server lists")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--num-prompts", type=int, default=100)
    parser.add_argument("--random-input-len", type=int, default=128, metavar="WORDS", help="length of a prompt")
    parser.add_argument("--random-output-len", type=int, default=64, metavar="TOKENS", help="length of an answer")
    parser.add_argument("--dataset-path", type=Path, help='lines of {"prompt", "output_tokens", "at"} instead')
    parser.add_argument("--request-rate", type=float, default=float("inf"), help="arrivals per second; inf: at once")
    parser.add_argument("--burstiness", type=float, default=1.0, help="shape of the gamma distribution of the gaps")
    parser.add_argument("--max-concurrency", type=int, help="requests that may run at once")
    parser.add_argument("--processes", type=int, default=1, help="client processes, where one would be the bottleneck")
    parser.add_argument("--goodput", nargs="+", type=goal, default=[], metavar="NAME:MS", help=f"limits of {GOALS}")
    parser.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=0)
    add_output(parser)
    options = parser.parse_args(arguments)
    prompts = list(_prompts(options))
    model = options.model or first_model(options.url, options.api_key)
    target = Target(options.url.rstrip("/"), options.backend, model, options.api_key, options.ignore_eos)
    records = send(target, prompts, options.max_concurrency or max(len(prompts), 1), options.processes)
    figures = summarize(records, dict(options.goodput))
    print("\n".join(table(figures)))
    for reason in sorted({record.error for record in records if record.error})[:5]:
        print(f"failed: {reason}", file=sys.stderr)
    write(options.output, parser.prog, arguments, model=model, figures=figures, records=list(map(asdict, records)))
    return 1 if figures["failed"] else 0


def goal(text: str) -> tuple[str, float]:
    """Returns the name and seconds of a limit such as `ttft:200`."""
    name, _, limit = text.partition(":")
    if name not in GOALS or not limit.replace(".", "", 1).isdigit():
        raise ArgumentTypeError(f"{text} is no limit: give one of {', '.join(GOALS)}, a colon and milliseconds")
    return name, float(limit) / 1000


def arrivals(count: int, rate: float, burstiness: float, draw: random.Random) -> list[float]:
    """Returns when requests arrive: gaps of a gamma distribution with that shape, exponential at 1, around 1 / rate.

    As in vLLM, the times are scaled so that the last one is at count / rate.
    """
    if rate == float("inf"):
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        now += draw.gammavariate(burstiness, 1 / (rate * burstiness))
        times.append(now)
    scale = count / rate / now if now else 1.0
    return [moment * scale for moment in times]


def first_model(url: str, api_key: str) -> str:
    """Returns the first model that a server lists.

    Raises:
        ConfigurationError: it lists none.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urlopen(Request(f"{url}/v1/models", headers=headers), timeout=10) as answer:
            name: str = json.load(answer)["data"][0]["id"]
            return name
    except (OSError, ValueError, LookupError) as error:
        raise ConfigurationError(f"{url} lists no model: {error}; give --model") from error


def summarize(records: Sequence[Record], goals: dict[str, float]) -> dict[str, Any]:
    """Returns the figures of all requests. Times are in milliseconds."""
    good = [record for record in records if not record.error]
    seconds = max((record.sent + record.ended for record in records), default=0.0) or 1e-9
    times = {
        "ttft": [record.ttft for record in good],
        "tpot": [record.tpot for record in good if record.tpot is not None],
        "itl": [gap for record in good for gap in record.itl],
        "e2el": [record.ended for record in good],
    }
    tokens = sum(record.tokens for record in good)
    return {
        "completed": len(good),
        "failed": len(records) - len(good),
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "goodput": sum(_meets(record, goals) for record in good) / seconds if goals else None,
        "output_tokens_per_second": tokens / seconds,
        "total_tokens_per_second": (tokens + sum(record.prompt_tokens for record in good)) / seconds,
        "milliseconds": {name: _spread(values) for name, values in times.items()},
    }


def table(figures: dict[str, Any]) -> list[str]:
    """Returns the figures as lines of Markdown."""
    rows = [
        f"{name.upper()} ms | " + " | ".join(f"{spread[key]:.2f}" for key in ("mean", "median", "std", "p99"))
        for name, spread in figures["milliseconds"].items()
        if spread
    ]
    ended = f"{figures['completed']} answered, {figures['failed']} failed in {figures['seconds']:.2f} s: "
    rates = f"{figures['requests_per_second']:.2f} requests/s, {figures['output_tokens_per_second']:.1f} tokens/s out, "
    both = f"{figures['total_tokens_per_second']:.1f} in and out"
    good = "" if figures["goodput"] is None else f", goodput {figures['goodput']:.2f} requests/s"
    return [ended + rates + both + good, "", *markdown("| mean | median | std | p99", rows)]


def _prompts(options: argparse.Namespace) -> Iterator[Prompt]:
    draw = random.Random(options.seed)
    times = arrivals(options.num_prompts, options.request_rate, options.burstiness, draw)
    if options.dataset_path is None:
        for number, moment in enumerate(times):
            text = f"{number} " + " ".join(draw.choices(WORDS, k=options.random_input_len))
            yield Prompt(text, options.random_output_len, moment)
        return
    try:
        lines = [json.loads(line) for line in options.dataset_path.read_text().splitlines() if line.strip()]
        for line, moment in zip(lines, times, strict=False):
            tokens = int(line.get("output_tokens", options.random_output_len))
            yield Prompt(str(line["prompt"]), tokens, float(line.get("at", moment)))
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise ConfigurationError(f"{options.dataset_path} has no prompts, one a line: {error!r}") from error


def send(target: Target, prompts: Sequence[Prompt], clients: int, processes: int = 1) -> list[Record]:
    """Sends each prompt at its time, at most `clients` at once, from as many processes; returns what came of them.

    Each process has an equal share of the prompts and of the clients, and all begin at the same moment.

    Raises:
        ConfigurationError: there are fewer clients than processes.
    """
    if not 1 <= processes <= clients:
        raise ConfigurationError(f"{clients} clients cannot be divided among {processes} processes: set fewer")
    if processes == 1:
        return asyncio.run(_send(target, prompts, clients))
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawning, _await_others, (spawning.Barrier(processes),)) as pool:
        shares = [prompts[number::processes] for number in range(processes)]
        limits = [len(range(number, clients, processes)) for number in range(processes)]
        parts = [pool.submit(_send_share, target, share, limit) for share, limit in zip(shares, limits, strict=True)]
        return list(chain.from_iterable(part.result() for part in parts))


def _await_others(barrier: Barrier) -> None:
    """Begins a client process, when all have started."""
    barrier.wait(READY_WITHIN)


def _send_share(target: Target, prompts: Sequence[Prompt], clients: int) -> list[Record]:
    return asyncio.run(_send(target, prompts, clients))


async def _send(target: Target, prompts: Sequence[Prompt], clients: int) -> list[Record]:
    room = asyncio.Semaphore(clients)
    start = time.perf_counter()
    with tqdm(total=len(prompts), unit="request", disable=not sys.stderr.isatty()) as bar:

        async def ask(prompt: Prompt) -> Record:
            await asyncio.sleep(prompt.at - (time.perf_counter() - start))
            async with room:
                record = await _ask(target, prompt, start)
            bar.update()
            return record

        return await asyncio.gather(*map(ask, prompts))


async def _ask(target: Target, prompt: Prompt, start: float) -> Record:
    body: dict[str, Any] = {
        "model": target.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": prompt.max_tokens,
        "temperature": 0.0,
    }
    if target.ignore_eos:
        body["ignore_eos"] = True
    if target.backend == "openai":
        body["prompt"] = prompt.text
    else:
        body["messages"] = [{"role": "user", "content": prompt.text}]
    sent = time.perf_counter()
    record = Record(sent - start)
    try:
        async for event in post(target.url + PATHS[target.backend], body, target.api_key):
            record.ended = time.perf_counter() - sent
            if "error" in event:
                record.error = str(event["error"])
            if usage := event.get("usage"):
                record.prompt_tokens, record.tokens = usage["prompt_tokens"], usage["completion_tokens"]
            if any(choice.get("text") or choice.get("delta", {}).get("content") for choice in event.get("choices", ())):
                record.chunks.append(record.ended)
    except ConfigurationError as error:
        record.ended, record.error = time.perf_counter() - sent, str(error)
    if record.chunks and not record.error:
        record.ended = record.chunks[-1]  # as in vLLM, what follows the last text is no part of the latency
    return record


def _meets(record: Record, goals: dict[str, float]) -> bool:
    seen = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.ended}
    return all(seen[name] <= limit for name, limit in goals.items())


def _spread(found: Sequence[float]) -> dict[str, float] | None:
    if not found:
        return None
    ordered = sorted(1000 * each for each in found)
    place = 0.99 * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return {
        "mean": statistics.fmean(ordered),
        "median": statistics.median(ordered),
        "std": statistics.pstdev(ordered),
        "p99": ordered[low] + (ordered[high] - ordered[low]) * (place - low),
    }
