"""Attacks a stack of its own with large refused requests, and with slow and idle connections.

Large requests are refused by different services, over HTTP and over NATS; the memory of the gateway and of the
tokenizer is read before and after them. Then connections send headers and bodies a byte at a time, others send nothing:
while they are open, an honest request is timed.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

from pagewire.bench._common.output import add_output, markdown, write
from pagewire.bench._common.stack import resident_bytes
from pagewire.embedded.stack import Stack
from pagewire.shared import subjects
from pagewire.shared.bus import nats
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.settings.config import Settings
from pagewire.shared.settings.flags import Parser
from pagewire.shared.telemetry import logs

MODEL = "bundled"
SIZE = 7_000_000
"""Bytes of a large request."""
AT_ONCE = 8
"""Large requests that are sent at the same time."""
WATCHED = ("gateway", "tokenizer")
"""The services that such requests reach."""
ANSWER_WITHIN = 60.0
"""Seconds within which a request must be answered."""


@dataclass(frozen=True)
class Flood:
    """Large requests that are refused in the same way."""

    name: str
    transport: str
    head: str
    """The request up to a long text."""
    tail: str
    status: int
    """HTTP status of the refusal, or the code of its frame."""

    def body(self, size: int) -> bytes:
        """Returns a request of `size` bytes."""
        return (self.head + "x " * ((size - len(self.head) - len(self.tail)) // 2) + self.tail).encode()


FLOODS = (
    Flood("not JSON", "HTTP", '{"model": "bundled", "prompt": "', "", 400),
    Flood("an unknown field", "HTTP", '{"model": "bundled", "nonsense": "', '"}', 400),
    Flood("many small objects", "HTTP", '{"model": "bundled", "tools": ["', '", {}]}', 400),
    Flood("a bad parameter", "HTTP", '{"model": "bundled", "top_p": 7, "prompt": "', '"}', 400),
    Flood(
        "a bad parameter, streamed", "HTTP", '{"model": "bundled", "stream": true, "top_p": 7, "prompt": "', '"}', 400
    ),
    Flood("a model that is not there", "HTTP", '{"model": "other", "prompt": "', '"}', 404),
    Flood("too long for the context", "HTTP", '{"model": "bundled", "prompt": "', '"}', 400),
    Flood("not JSON", "NATS", '{"prompt": "', "", 400),
    Flood("a bad parameter", "NATS", '{"sampling": {"top_p": 7}, "prompt": "', '"}', 400),
    Flood("too long for the context", "NATS", '{"prompt": "', '"}', 422),
)


@dataclass(frozen=True)
class Growth:
    """The memory of a service around a flood, in MB of 10^6 bytes."""

    flood: str
    service: str
    requests: int
    seconds: float
    before: float
    after: float


@dataclass(frozen=True)
class Siege:
    """An honest request beside connections that only take room."""

    kind: str
    connections: int
    answer_ms: float
    """Time of the honest request."""
    memory: float
    """Memory that the gateway has gained, in MB."""


def main(arguments: list[str]) -> int:
    """Prints two tables and writes `--output`."""
    parser = Parser(prog="pagewire bench attack", description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="large requests of each kind")
    parser.add_argument("--slow", type=int, default=500, help="connections that send a byte at a time, of each kind")
    parser.add_argument("--idle", type=int, default=2000, help="connections that send nothing")
    add_output(parser)
    options = parser.parse_args(arguments)
    logs.configure(Settings(log_level="warning"), service="bench")
    growths, sieges = asyncio.run(_measure(options.requests, options.slow, options.idle))
    print("\n".join(floods_table(growths)))
    print()
    print("\n".join(sieges_table(sieges)))
    write(
        options.output,
        parser.prog,
        arguments,
        floods=[asdict(each) for each in growths],
        sieges=[asdict(each) for each in sieges],
    )
    return 0


def floods_table(growths: Sequence[Growth]) -> list[str]:
    """Returns a line per flood and service, in Markdown."""
    rows = [
        f"{each.flood} | {each.service} | {each.requests} | {each.seconds:.0f} | {each.before:.0f} | {each.after:.0f}"
        f" | {each.after - each.before:+.0f}"
        for each in growths
    ]
    return markdown("refused for | memory of | requests | seconds | before MB | after MB | growth MB", rows)


def sieges_table(sieges: Sequence[Siege]) -> list[str]:
    """Returns a line per kind of connections, in Markdown."""
    rows = [f"{each.kind} | {each.connections} | {each.answer_ms:.0f} | {each.memory:+.0f}" for each in sieges]
    return markdown("open connections | number | honest request ms | gateway MB", rows)


async def flood(each: Flood, http: str, nats_url: str, requests: int, size: int = SIZE) -> None:
    """Sends `requests` requests of `size` bytes, `AT_ONCE` at a time.

    Raises:
        ConfigurationError: a request is answered in another way than expected.
    """
    body, left = each.body(size), iter(range(requests))
    over_http = each.transport == "HTTP"

    async def over_connection() -> None:
        reader, writer = await _connect(http)
        try:
            for _ in left:
                _expect(each, *await _post(reader, writer, "/v1/completions", body))
        finally:
            writer.close()

    async def over_bus() -> None:
        bus = await nats.connect(nats_url, name="attack", inbox_prefix="_INBOX")
        try:
            for _ in left:
                reply = await bus.request(f"{subjects.GENERATE}.{MODEL}", body, timeout=ANSWER_WITHIN)
                _expect(each, json.loads(reply.data)["code"], reply.data)
        finally:
            await bus.close()

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(over_connection() if over_http else over_bus())
    except* ConfigurationError as errors:
        raise errors.exceptions[0] from None


async def honest_request(http: str) -> float:
    """Returns the seconds that a small request takes on a new connection.

    Raises:
        ConfigurationError: it is not answered as it should be.
    """
    began = time.perf_counter()
    body = json.dumps({"model": MODEL, "prompt": "Once", "max_tokens": 1}).encode()
    async with asyncio.timeout(ANSWER_WITHIN):
        reader, writer = await _connect(http)
        status, answer = await _post(reader, writer, "/v1/completions", body)
        writer.close()
    if status != 200:
        raise ConfigurationError(f"an honest request is answered with {status}: {answer.decode()}")
    return time.perf_counter() - began


@asynccontextmanager
async def siege(http: str, connections: int, start: bytes, dripping: bytes = b"") -> AsyncIterator[None]:
    """Keeps connections open that have sent `start` and then send `dripping`, a byte every half second."""
    opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def drip() -> None:
        for byte in dripping:
            await asyncio.sleep(0.5)
            for _, writer in opened:
                if not writer.transport.is_closing():
                    writer.write(bytes((byte,)))

    for first in range(0, connections, 100):
        opened += await asyncio.gather(*(_connect(http) for _ in range(first, min(first + 100, connections))))
    for _, writer in opened:
        writer.write(start)
    task = asyncio.create_task(drip())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        for _, writer in opened:
            writer.transport.abort()


def sieges(slow: int, idle: int) -> list[tuple[str, int, bytes, bytes]]:
    """Returns the arguments of `siege` behind the kind of connections."""
    header = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    return [
        ("slow headers", slow, header, b"a: " + b"x" * 10_000),
        ("slow bodies", slow, header + b"content-length: 100000\r\n\r\n", b'{"prompt": "' + b"x" * 10_000),
        ("idle", idle, b"", b""),
    ]


async def _measure(requests: int, slow: int, idle: int) -> tuple[list[Growth], list[Siege]]:
    growths: list[Growth] = []
    answers: list[Siege] = []
    settings = Settings(model=MODEL, device="sim:zero", port=0, nats_port=0, log_level="error")
    async with Stack(settings) as stack:
        address = await stack.ready()
        await honest_request(address.http)
        before = resident_bytes()
        for each in FLOODS:
            began = time.perf_counter()
            await flood(each, address.http, address.nats, requests)
            seconds = time.perf_counter() - began
            after = resident_bytes()
            for service in WATCHED if each.transport == "HTTP" else WATCHED[1:]:
                name = f"{each.name} ({each.transport})"
                sizes = before[service] / 1e6, after[service] / 1e6
                growths.append(Growth(name, service, requests, seconds, *sizes))
                print(floods_table(growths)[-1], flush=True)
        for kind, connections, start, dripping in sieges(slow, idle):
            before = resident_bytes()
            async with siege(address.http, connections, start, dripping):
                await asyncio.sleep(2)
                taken = await honest_request(address.http)
                gained = resident_bytes()["gateway"] - before["gateway"]
                answers.append(Siege(kind, connections, 1000 * taken, gained / 1e6))
    return growths, answers


def _expect(each: Flood, status: int, answer: bytes) -> None:
    if status != each.status:
        raise ConfigurationError(f"{each.name} over {each.transport} is answered with {status}: {answer[:300]!r}")


async def _connect(http: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    where = urlsplit(http)
    return await asyncio.open_connection(where.hostname, where.port)


async def _post(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: bytes
) -> tuple[int, bytes]:
    """Sends a request; returns status and body of the response."""
    writer.write(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode())
    writer.write(body)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(length)
