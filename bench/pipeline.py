"""Measures the pipeline alone: tokens through all services, with a simulated device that takes no time (simulated).

A client process of its own keeps all streams running. Tokens are those that the executor has sampled, frames those that
the client has received, and the operating system counts the CPU time of every process.

With `--waiting`, so many more streams over HTTP are open and wait: their priority is lower, and slots are short. At
the end all of them are answered. Failed requests and the memory of the gateway are reported.
"""

import asyncio
import json
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import uvloop

from pagewire.bench._common.output import add_output, markdown, write
from pagewire.bench._common.stack import counters, cpu_seconds, resident_bytes
from pagewire.embedded.programs import GATEWAY, PIPELINE
from pagewire.embedded.stack import Stack
from pagewire.shared import subjects
from pagewire.shared.bus import Message, nats
from pagewire.shared.progress import shown
from pagewire.shared.settings.config import Settings
from pagewire.shared.settings.flags import Parser
from pagewire.shared.telemetry import logs

PROCESSES = ("client", "tokenizer", "scheduler", "executor", "detokenizer", "gateway", "nats-server")
TOKENS_PER_REQUEST = 1900
WAITING_TOKENS = 16
"""Tokens of a request that waits."""
END_WITHIN = 300.0
"""Seconds in which all requests are answered at the end."""
WARM_UP = 2.0
"""Seconds before anything is counted: all streams have begun."""


@dataclass
class Figures:
    """Results of one run."""

    transport: str
    streams: int
    seconds: float
    tokens: int
    frames: int
    cpu_us_per_token: dict[str, float]
    """CPU microseconds per token, by process name; the client is `client`, the broker `nats-server`."""
    backlog: list[int] = field(default_factory=list)
    """Tokens on their way from the executor to the client, once a second; only over NATS, where frames are tokens."""
    waiting: int = 0
    """Streams that were open and waited."""
    answered: int = 0
    """Requests that were answered in full; only over HTTP."""
    failed: int = 0
    """Requests that were not; only over HTTP."""
    gateway_mb: list[float] = field(default_factory=list)
    """Resident memory of the gateway in MB of 10^6 bytes, once a second; only over HTTP."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = Parser(prog="pagewire bench pipeline", description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 256], help="streams at once")
    parser.add_argument("--seconds", type=float, default=10.0, help="time that is counted, per run")
    parser.add_argument("--transport", nargs="+", choices=["nats", "http"], default=["nats", "http"])
    parser.add_argument("--waiting", type=int, default=0, help="more streams, over HTTP only, that wait meanwhile")
    add_output(parser)
    options = parser.parse_args(arguments)
    if options.waiting and options.transport != ["http"]:
        parser.error("--waiting needs --transport http")
    logs.configure(Settings(log_level="warning"), service="bench")
    cells = list(product(options.transport, options.streams))
    runs = [asyncio.run(_run(*run, options.seconds, options.waiting)) for run in shown(cells, "runs")]
    print("\n".join(table(runs)))
    if options.waiting:
        print()
        print("\n".join(waiting_table(runs)))
    write(options.output, parser.prog, arguments, simulated="sim:zero", runs=[asdict(run) for run in runs])
    return 0


def table(runs: Sequence[Figures]) -> list[str]:
    """Returns a line per run, in Markdown, with the CPU microseconds per token of each process."""
    rows = (
        f"{run.transport}, {run.streams} streams, {run.seconds:.0f} s | {run.rate:.0f}"
        f" | {run.frames / max(run.tokens, 1):.2f} | "
        + " | ".join(f"{run.cpu_us_per_token[name]:.1f}" if name in run.cpu_us_per_token else "" for name in PROCESSES)
        for run in runs
    )
    return markdown(" | ".join(["simulated", "tokens/s", "frames/token", *PROCESSES]), rows)


def waiting_table(runs: Sequence[Figures]) -> list[str]:
    """Returns a line per run with waiting streams, in Markdown."""
    rows = (
        f"{run.streams} active, {run.waiting} waiting | {run.answered} | {run.failed}"
        f" | {run.gateway_mb[0]:.1f} | {max(run.gateway_mb):.1f} | {run.gateway_mb[-1]:.1f}"
        for run in runs
    )
    return markdown("simulated | answered | failed | gateway MB, at first | at most | at last", rows)


async def _run(transport: str, streams: int, seconds: float, waiting: int = 0) -> Figures:
    settings = Settings(
        model="bundled",
        port=0,
        nats_port=0,
        device="sim:zero",
        max_num_seqs=max(1, streams * 3 // 4) if waiting else streams,  # so that an active stream always comes first
        max_num_batched_tokens=streams + 512,
        num_kv_blocks=max((TOKENS_PER_REQUEST // 16 + 8) * streams, 128),  # one sequence of 2,048 tokens fits at least
        log_level="error",
    )
    async with Stack(settings, PIPELINE if transport == "nats" else (*PIPELINE, GATEWAY)) as stack:
        address = await stack.ready()
        ours, theirs = multiprocessing.Pipe()
        target = _read_nats if transport == "nats" else _read_http
        url = address.nats if transport == "nats" else address.http
        client = multiprocessing.get_context("spawn").Process(
            target=_client, args=(target, url, streams, waiting, theirs)
        )
        client.start()
        try:
            await asyncio.sleep(WARM_UP)
            first = last = await _observe(ours, address.nats)
            backlog, memory = [], []
            while last.at < first.at + seconds:
                await asyncio.sleep(min(1.0, first.at + seconds - last.at))
                last = await _observe(ours, address.nats)
                backlog.append(last.tokens - last.frames)
                memory += [resident_bytes()["gateway"] / 1e6] if transport == "http" else []
            answered, failed = await _ask(ours, "end") if transport == "http" else (0, 0)
        finally:
            client.terminate()
            client.join()
    tokens = last.tokens - first.tokens
    spent = {name: (last.cpu[name] - first.cpu[name]) * 1e6 / max(tokens, 1) for name in last.cpu if name in first.cpu}
    frames = last.frames - first.frames
    return Figures(
        transport,
        streams,
        last.at - first.at,
        tokens,
        frames,
        spent,
        backlog if transport == "nats" else [],
        waiting,
        answered,
        failed,
        memory,
    )


@dataclass(frozen=True)
class _Observation:
    at: float
    tokens: int
    frames: int
    cpu: dict[str, float]


async def _observe(client: Connection, url: str) -> _Observation:
    """Returns the counts of all processes at this moment."""
    (executor,) = await counters(url)
    frames = await _ask(client, "frames")
    return _Observation(time.monotonic(), int(executor["sampled"]), frames, cpu_seconds())


async def _ask(client: Connection, what: str) -> Any:
    """Asks the client for its frames, or to end its requests and say how many were answered and how many failed."""
    client.send(what)
    return await asyncio.wait_for(asyncio.to_thread(client.recv), END_WITHIN)


@dataclass
class _Counts:
    frames: int = 0
    answered: int = 0
    failed: int = 0
    ends: bool = False
    """Whether no request is sent any more."""


def _client(target: Any, url: str, streams: int, waiting: int, wire: Connection) -> None:
    counts = _Counts()

    def answer() -> None:
        counts.ends = wire.recv() == "end"
        if not counts.ends:
            wire.send(counts.frames)

    async def serve() -> None:
        asyncio.get_running_loop().add_reader(wire.fileno(), answer)
        await target(url, streams, waiting, counts)
        wire.send((counts.answered, counts.failed))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


async def _read_nats(url: str, streams: int, _waiting: int, counts: _Counts) -> None:
    """Keeps `streams` streams over NATS running: each is requested again as soon as it ends."""
    bus = await nats.connect(url, name="bench", inbox_prefix="_INBOX")
    sampling = {"max_tokens": TOKENS_PER_REQUEST, "ignore_eos": True}
    body = json.dumps({"prompt": [5, 6, 7], "stream": True, "sampling": sampling, "timeout_ms": 3_600_000}).encode()

    async def stream() -> None:
        inbox = bus.new_inbox()

        def receive(message: Message) -> None:
            if not message.data:
                bus.publish(f"{subjects.GENERATE}.bundled", body, reply=inbox)
            elif message.data.startswith(b'{"type":"delta"'):
                counts.frames += 1

        await bus.subscribe(inbox, receive)
        bus.publish(f"{subjects.GENERATE}.bundled", body, reply=inbox)

    for _ in range(streams):
        await stream()
    await asyncio.get_running_loop().create_future()


async def _read_http(url: str, streams: int, waiting: int, counts: _Counts) -> None:
    """Keeps `streams` streams of server-sent events running, without an HTTP library, whose costs would count.

    Returns once all requests have ended, after `counts.ends` is set; those that wait are sent once.
    """
    host, port = url.removeprefix("http://").split(":")

    async def stream(message: bytes, *, again: bool) -> None:
        while not counts.ends:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(message)
            first = data = await reader.read(1 << 16)
            tail = b""
            while data:
                counts.frames += data.count(b"data: {")
                tail = (tail + data)[-64:]
                data = await reader.read(1 << 16)
            writer.close()
            complete = first.startswith(b"HTTP/1.1 200 ") and b"data: [DONE]" in tail
            counts.answered += complete
            counts.failed += not complete
            if not again:
                break

    async with asyncio.TaskGroup() as tasks:
        for _ in range(streams):
            tasks.create_task(stream(_http_request(url, TOKENS_PER_REQUEST, priority=0), again=True))
        for _ in range(waiting):
            tasks.create_task(stream(_http_request(url, WAITING_TOKENS, priority=1), again=False))


def _http_request(url: str, max_tokens: int, priority: int) -> bytes:
    request = {"model": "bundled", "prompt": [5, 6, 7], "max_tokens": max_tokens, "ignore_eos": True}
    request |= {"priority": priority, "stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps(request).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n"
    head += "Content-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
