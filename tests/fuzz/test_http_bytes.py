"""Any bytes on an HTTP connection: the answer is HTTP and no fault, and the next client is served."""

import asyncio
import logging
import re
import traceback
from typing import Any

import pytest
import uvloop
from hypothesis import strategies as st
from starlette.types import ASGIApp

from pagewire.services.gateway.http import server
from pagewire.services.gateway.http.http_protocol import ConnectionLimits, Connections
from pagewire.services.gateway.routes import endpoint
from pagewire.shared.process.listener import listen
from tests.fuzz.fuzzing import fuzz, mutated
from tests.services.gateway.http_client import start_gateway
from tests.support.responder import MODEL
from tests.support.waiting import PATIENCE

BODY = b'{"model": "%s", "prompt": "x", "stream": true}' % MODEL.encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
REQUESTS = [
    POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\nTrailer: x\r\n\r\n",
    POST + b"Expect: 100-continue\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(BODY) + BODY,
    b"GET /v1/models?a=%20b#c HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\nGET /livez HTTP/1.0\r\n\r\n",
    b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\nOPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nabc",
]
TOKENS = [
    b"\r\n",
    b"\r\n\r\n",
    b"\n",
    b": ",
    b"Content-Length: 5\r\n",
    b"Content-Length: -1\r\n",
    b"Content-Length: 99999999999999999999\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Expect: 100-continue\r\n",
    b"Connection: close\r\n",
    b"Upgrade: h2c\r\nConnection: Upgrade\r\n",
    b"Authorization: Bearer x\r\n",
    b"CONNECT x:1 HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"HTTP/1.1",
    b"HTTP/9.9",
    b"%00%ff%2e%2e/",
    b"http://[::1",
    b"FFFFFFFFFFFFFFFFF\r\n",
    b"0\r\n\r\n",
    b"a" * 3000,
    b"x: y\r\n" * 60,
    b"\x16\x03\x01",
    b"\x00",
]
KNOWN = POST + b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n"
LIMITS = ConnectionLimits(
    header_time=2, body_time=2, idle_time=2, discard_time=0.2, close_time=0.2, header_bytes=2000, headers=50
)
"""Every client ends its side, so the first three times never pass; they are long enough for a busy machine."""
STATUS = re.compile(rb"^HTTP/1\.1 (\d{3})", re.MULTILINE)


async def exchange(port: int, pieces: list[bytes]) -> bytes:
    """Sends pieces, each in a packet of its own, then ends; returns what comes until the server ends, too."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            if not writer.transport.is_closing():  # uvloop raises RuntimeError
                writer.write(piece)
            await asyncio.sleep(0)
        if not writer.transport.is_closing():
            writer.write_eof()
        return await asyncio.wait_for(reader.read(), PATIENCE)
    except ConnectionError:
        return b""
    finally:
        writer.close()


class Doors:
    """A gateway's server and what goes wrong in it."""

    def __init__(self) -> None:
        self.port = 0
        self.connections = Connections(LIMITS)
        self.faults: list[str] = []

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.faults.append(str(context)))
        app: ASGIApp = (await start_gateway()).app
        listener = listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self._serving = asyncio.create_task(server.Server(app, listener, self.connections).run())

    def note(self, error: BaseException | None) -> None:
        self.faults.append("".join(traceback.format_exception(error)) if error else "logged without an exception")

    async def stop(self) -> None:
        self._serving.cancel()
        await asyncio.wait({self._serving})

    async def check(self, data: bytes, cuts: list[int]) -> None:
        ends = [*sorted(cuts), len(data)]
        pieces = [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        answer = await exchange(self.port, pieces)
        statuses = {int(status) for status in STATUS.findall(answer)}
        assert statuses <= {100, 200, 307, 400, 404, 405, 408, 413, 415, 431, 503}, answer
        question = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert (await exchange(self.port, [question])).endswith(b"alive")
        assert self.connections.body_bytes >= 0
        assert not self.faults, "\n".join(self.faults)


def test_any_bytes_on_a_connection_raise_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    doors = Doors()
    # uvicorn and the endpoints log what is raised, and nothing else as an error.
    for logger in (logging.getLogger("uvicorn.error"), endpoint._log):
        monkeypatch.setattr(logger, "error", lambda *_, exc_info=None: doors.note(exc_info), raising=False)
    inputs: Any = st.tuples(mutated(REQUESTS, TOKENS), st.lists(st.integers(0, 300), max_size=4))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(doors.start())
        try:
            fuzz(inputs, lambda pair: runner.run(doors.check(*pair)), known=[(KNOWN, [])], batch=20)
        finally:
            runner.run(doors.stop())
    assert not doors.connections.open
    assert not doors.connections.idle
    assert doors.connections.body_bytes == 0
