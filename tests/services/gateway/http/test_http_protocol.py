"""The limits of HTTP connections, on real sockets: time, sizes and numbers."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from pagewire.services.gateway.http import http_protocol, server
from pagewire.services.gateway.http.connection import ClientGone, read_body
from pagewire.services.gateway.http.http_protocol import ConnectionLimits, Connections
from pagewire.shared.errors import RequestError
from pagewire.shared.process.listener import listen
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
BODY_LIMIT = 100_000
"""Bytes of a body that the application reads."""


@pytest.fixture(autouse=True)
def frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "CHECK_INTERVAL", 0.01)


@dataclass
class App:
    """Answers with the length of the body."""

    bodies: list[int] = field(default_factory=list)
    held: asyncio.Event | None = None
    """Event that answers to the path /held wait for; None: they do not wait."""
    gone: int = 0
    """Number of clients of the path /watched that have disconnected."""
    size: int = 0
    """Bytes that an answer has beside the length."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(scope, receive, BODY_LIMIT)
        except RequestError as error:
            await PlainTextResponse(error.message, error.code)(scope, receive, send)
            return
        except ClientGone:
            return
        self.bodies.append(len(body))
        if self.held is not None and scope["path"] == "/held":
            await self.held.wait()
        if scope["path"] == "/watched":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone += 1
            return
        await PlainTextResponse(f"{len(body)}" + self.size * " ")(scope, receive, send)


@dataclass
class Server:
    """A running server."""

    port: int
    app: App
    connections: Connections
    serving: server.Server
    peers: "list[Peer]" = field(default_factory=list)

    async def connect(self) -> "Peer":
        self.peers.append(Peer(*await asyncio.open_connection("127.0.0.1", self.port)))
        return self.peers[-1]

    async def answers(self) -> bool:
        """Returns whether an honest request is answered."""
        async with asyncio.timeout(PATIENCE):
            peer = await self.connect()
            return (await peer.ask(GET))[0] == 200


@dataclass
class Peer:
    """A client that sends bytes as it likes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, bytes]:
        """Reads the next response: status and body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
        return int(head.split()[1]), await self.reader.readexactly(length)

    async def ask(self, data: bytes) -> tuple[int, bytes]:
        self.send(data)
        return await self.answer()

    async def refusal(self) -> tuple[int, str]:
        """Reads an error in OpenAI's shape, behind which the connection ends: status and code."""
        status, body = await self.answer()
        assert await self.reader.read() == b""
        return status, msgspec.json.decode(body)["error"]["code"]

    async def ended(self) -> bool:
        try:
            return await self.reader.read() == b""
        except ConnectionError:
            return True


@asynccontextmanager
async def serving(limits: ConnectionLimits, app: App | None = None) -> AsyncIterator[Server]:
    app = app or App()
    connections = Connections(limits)
    listener = listen("127.0.0.1", 0)
    serving = server.Server(app, listener, connections)
    task = asyncio.create_task(serving.run())
    running = Server(listener.getsockname()[1], app, connections, serving)
    try:
        yield running
    finally:
        for peer in running.peers:
            peer.writer.transport.abort()
        task.cancel()
        await asyncio.wait({task})
    assert connections.body_bytes == 0


def post(body: bytes, *lines: bytes, path: bytes = b"/") -> bytes:
    head = [b"POST %s HTTP/1.1" % path, b"host: x", b"content-length: %d" % len(body), *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


async def test_a_connection_is_used_again() -> None:
    async with serving(ConnectionLimits()) as running:
        peer = await running.connect()
        for size in (0, 1, 5000, BODY_LIMIT):
            assert await peer.ask(post(b"x" * size)) == (200, b"%d" % size)
        assert running.connections.body_bytes == 0
        peer.send(post(b"abc") + GET + post(b"abcd"))
        assert [(await peer.answer())[1] for _ in range(3)] == [b"3", b"0", b"4"]
        assert len(running.connections.idle) == 1
        peer.writer.close()
        await until(lambda: not running.connections.open)
        assert not running.connections.idle


@pytest.mark.parametrize("start", [b"G", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nhost: x\r\na: b"])
async def test_a_header_that_takes_too_long_ends_with_408(start: bytes) -> None:
    async with serving(ConnectionLimits(header_time=0.1)) as running:
        peer = await running.connect()
        peer.send(start)
        assert await peer.refusal() == (408, "deadline_exceeded")
        assert running.connections.refused == 1


async def test_a_connection_without_a_request_is_closed_after_a_while() -> None:
    async with serving(ConnectionLimits(idle_time=0.1)) as running:
        assert await (await running.connect()).ended()
        peer = await running.connect()
        assert (await peer.ask(GET))[0] == 200
        assert await peer.ended()


@pytest.mark.parametrize(
    "start",
    [
        post(b"")[:-4].replace(b"length: 0", b"length: 50000") + b"\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\ntrailer: x\r\n",
    ],
)
async def test_a_body_that_stops_coming_ends_with_408(start: bytes) -> None:
    async with serving(ConnectionLimits(body_time=0.1)) as running:
        peer = await running.connect()
        peer.send(start)
        assert await peer.refusal() == (408, "deadline_exceeded")
        assert running.connections.body_bytes == 0
        assert running.app.bodies == []


async def test_a_body_that_keeps_the_rate_may_take_longer() -> None:
    async with serving(ConnectionLimits(body_time=0.5, body_step=1000)) as running:
        peer = await running.connect()
        loop = asyncio.get_running_loop()
        began = loop.time()
        peer.send(post(b"x" * 8000)[:-8000])
        for _ in range(8):
            await asyncio.sleep(0.1)  # the rate is what is tested
            peer.send(b"x" * 1000)
        assert await peer.answer() == (200, b"8000")
        assert loop.time() - began > 0.5


async def test_a_body_below_the_rate_is_ended_however_much_came_before() -> None:
    async with serving(ConnectionLimits(body_time=0.2, body_step=1000)) as running:
        peer = await running.connect()
        peer.send(post(b"x" * 90_000)[:-30_000])

        async def trickle() -> None:
            while True:
                peer.send(b"x")
                await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        assert (await peer.answer())[0] == 408
        trickling.cancel()


HEADERS: dict[str, bytes] = {
    "one long line": b"a: " + b"x" * 3000,
    "a line that never ends": b"a: " + b"x" * 100_000,
    "a name that never ends": b"x" * 100_000,
    "many lines": b"\r\n".join(b"a: b" for _ in range(60)),
    "many long lines": b"\r\n".join(b"a: " + b"x" * 500 for _ in range(6)),
}


@pytest.mark.parametrize("case", HEADERS)
async def test_a_header_that_is_too_large_is_refused_with_431(case: str) -> None:
    async with serving(ConnectionLimits(header_bytes=2000, headers=50)) as running:
        peer = await running.connect()
        peer.send(b"GET / HTTP/1.1\r\nhost: x\r\n" + HEADERS[case])
        peer.send(b"x" * 100_000 if "never" in case else b"\r\n\r\n")
        assert await peer.refusal() == (431, "invalid_request")
        assert await running.answers()


@pytest.mark.parametrize("data", [b"\r\n", b"\n"])
async def test_line_breaks_ahead_of_a_request_are_not_read_for_ever(data: bytes) -> None:
    async with serving(ConnectionLimits(header_bytes=2000)) as running:
        peer = await running.connect()
        peer.send(data * 2001)
        assert await peer.refusal() == (431, "invalid_request")
        assert await running.answers()


async def test_a_target_that_is_too_long_is_refused_with_431() -> None:
    async with serving(ConnectionLimits(header_bytes=2000)) as running:
        peer = await running.connect()
        assert (await peer.ask(b"GET /" + b"x" * 3000))[0] == 431


@pytest.mark.parametrize("rest", [b"5;" + b"x" * 9000, b"0\r\na: " + b"x" * 9000, b"0\r\n" + b"a: b\r\n" * 60])
async def test_large_extensions_and_trailers_of_a_chunked_body_are_refused(rest: bytes) -> None:
    async with serving(ConnectionLimits(header_bytes=2000, headers=50)) as running:
        peer = await running.connect()
        head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        for start in range(0, len(head + rest), 1000):
            peer.send((head + rest)[start : start + 1000])
            await asyncio.sleep(0)
        assert await peer.refusal() == (431, "invalid_request")
        assert running.app.bodies == []


async def test_a_large_body_is_refused_before_it_is_sent() -> None:
    async with serving(ConnectionLimits(discard_time=0.2)) as running:
        peer = await running.connect()
        head = post(b"").replace(b"length: 0", b"length: %d" % (BODY_LIMIT + 1))
        assert (await peer.ask(head))[0] == 413
        assert await peer.ended()  # the body does not come
        assert running.connections.body_bytes == 0


async def test_the_rest_of_a_refused_body_is_dropped_and_the_connection_used_again() -> None:
    async with serving(ConnectionLimits()) as running:
        peer = await running.connect()
        for _ in range(3):
            assert (await peer.ask(post(b"x" * 10 * BODY_LIMIT)))[0] == 413
        assert (await peer.ask(GET))[0] == 200
        chunks = b"".join(b"10000\r\n" + b"x" * 0x10000 + b"\r\n" for _ in range(20))
        head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        assert (await peer.ask(head + chunks + b"0\r\n\r\n"))[0] == 413
        assert (await peer.ask(GET))[0] == 200
        assert running.connections.body_bytes == 0


async def test_a_refused_body_is_not_read_for_ever() -> None:
    async with serving(ConnectionLimits(discard_time=0.2)) as running:
        peer = await running.connect()
        peer.send(post(b"").replace(b"length: 0", b"length: 1000000000"))
        assert (await peer.answer())[0] == 413

        async def pour() -> None:
            while True:
                peer.send(b"x" * 10_000)
                await asyncio.sleep(0.01)

        pouring = asyncio.create_task(pour())
        assert await peer.ended()
        pouring.cancel()


async def test_a_client_that_expects_100_continue_is_refused_before_its_body() -> None:
    async with serving(ConnectionLimits(discard_time=60)) as running:
        peer = await running.connect()
        head = post(b"", b"expect: 100-continue").replace(b"length: 0", b"length: 9000000")
        assert (await peer.ask(head))[0] == 413
        assert await peer.ended()


async def test_beyond_the_connections_the_longest_idle_is_closed() -> None:
    async with serving(ConnectionLimits(connections=3)) as running:
        first, second, third = [await running.connect() for _ in range(3)]
        await until(lambda: len(running.connections.open) == 3)
        assert (await first.ask(GET))[0] == 200  # the second is idle longest now
        assert await running.answers()
        assert await second.ended()
        assert (await first.ask(GET))[0] == 200
        assert (await third.ask(GET))[0] == 200


async def test_without_an_idle_connection_a_request_is_refused_with_503() -> None:
    app = App(held=asyncio.Event())
    assert app.held is not None
    async with serving(ConnectionLimits(connections=2), app) as running:
        busy = [await running.connect() for _ in range(2)]
        for peer in busy:
            peer.send(post(b"", path=b"/held"))
        await until(lambda: len(app.bodies) == 2)
        late = await running.connect()
        late.send(GET)
        assert await late.refusal() == (503, "unavailable")
        app.held.set()
        for peer in busy:
            assert (await peer.answer())[0] == 200
        assert await running.answers()


async def test_beyond_the_bytes_of_all_bodies_the_oldest_unfinished_one_is_refused() -> None:
    async with serving(ConnectionLimits(bodies=100_000)) as running:
        slow = [await running.connect() for _ in range(3)]
        for number, peer in enumerate(slow):
            peer.send(post(b"x" * 60_000)[:-20_000])
            await until(lambda: running.connections.body_bytes >= 40_000 * min(number + 1, 2))  # noqa: B023
        assert await slow[0].refusal() == (503, "unavailable")
        for peer in slow[1:]:
            peer.send(b"x" * 10_000)
        assert await running.answers()
        assert running.connections.body_bytes <= 100_000


async def test_the_body_of_a_queued_request_counts_until_its_own_answer() -> None:
    app = App(held=asyncio.Event())
    assert app.held is not None
    async with serving(ConnectionLimits(), app) as running:
        peer = await running.connect()
        peer.send(post(b"x" * 1000) + post(b"x" * 2000, path=b"/held") + post(b"x" * 300)[:-100])
        assert await peer.answer() == (200, b"1000")
        await until(lambda: len(app.bodies) == 2)
        assert running.connections.body_bytes == 2200
        assert len(running.connections.uploading) == 1
        app.held.set()
        assert await peer.answer() == (200, b"2000")
        assert running.connections.body_bytes == 200
        assert await peer.ask(b"x" * 100) == (200, b"300")
        assert running.connections.body_bytes == 0


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    async with serving(ConnectionLimits(write_time=0.2, close_time=0.2), App(size=50_000_000)) as running:
        with socket.create_connection(("127.0.0.1", running.port)) as deaf:
            deaf.sendall(GET)
            await until(lambda: running.connections.open)
            await until(lambda: not running.connections.open)


async def test_bytes_that_are_not_http_are_refused_in_the_shape_of_errors() -> None:
    async with serving(ConnectionLimits()) as running:
        for data in (
            b"\x16\x03\x01\x02\x00",
            b"GET\r\n\r\n",
            b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
            b"GET /\xff HTTP/1.1\r\n\r\n",
        ):
            peer = await running.connect()
            peer.send(data)
            assert await peer.refusal() == (400, "invalid_request")
        assert await running.answers()


async def test_a_stream_is_not_mixed_with_an_error() -> None:
    """Bytes behind a request do not change its answer."""
    app = App(held=asyncio.Event())
    assert app.held is not None
    async with serving(ConnectionLimits(header_time=0.1), app) as running:
        peer = await running.connect()
        peer.send(post(b"", path=b"/held") + b"GET /")
        await until(lambda: app.bodies)
        await asyncio.sleep(0.3)  # longer than a header may take
        app.held.set()
        assert await peer.answer() == (200, b"0")
        assert await peer.refusal() == (408, "deadline_exceeded")


async def test_a_server_that_leaves_waits_for_requests_and_closes_idle_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "LAST_IDLE_TIME", 0.2)
    app = App(held=asyncio.Event())
    assert app.held is not None
    async with serving(ConnectionLimits(), app) as running:
        busy, idle = await running.connect(), await running.connect()
        busy.send(post(b"", path=b"/held"))
        await until(lambda: app.bodies and len(running.connections.open) == 2)
        leaving = asyncio.create_task(running.serving.leave())
        assert await idle.ended()
        with pytest.raises(ConnectionRefusedError):
            await running.connect()
        assert not leaving.done()
        app.held.set()
        assert (await busy.answer())[0] == 200
        await leaving


async def test_the_application_learns_of_a_lost_client_with_queued_requests() -> None:
    async with serving(ConnectionLimits()) as running:
        for behind in (b"", b"GET /", GET, GET + post(b"abc")):
            peer = await running.connect()
            peer.send(post(b"", path=b"/watched") + behind)
            await peer.reader.readuntil(b"begun")
            before = running.app.gone
            peer.writer.transport.abort()
            await until(lambda: running.app.gone == before + 1)  # noqa: B023


async def test_bytes_that_are_not_http_behind_a_request_do_not_reach_its_answer() -> None:
    async with serving(ConnectionLimits()) as running:
        for behind in (b"\0\0\0\0", GET + b"\0\0\0\0", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 500):
            peer = await running.connect()
            peer.send(post(b"", path=b"/watched"))
            await peer.reader.readuntil(b"begun")
            before = running.app.gone
            peer.send(behind)
            assert (await peer.reader.read()).strip() == b""
            await until(lambda: running.app.gone == before + 1)  # noqa: B023
