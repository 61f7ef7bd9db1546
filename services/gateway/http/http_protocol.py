"""An HTTP connection with limits: time, sizes and the number of connections.

uvicorn bounds none of these with its fast parser. hypercorn bounds some and is several times slower, granian brings an
event loop of its own, so the limits are in this subclass of uvicorn's connection.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from pagewire.services.gateway.http import errors
from pagewire.services.gateway.http.declined_upgrade import without_offer
from pagewire.services.gateway.http.unchunked import UnchunkedCycle

LAST_IDLE_TIME = 5.0
"""Seconds that a connection may be idle while the server leaves: its client may be about to send the next request."""
CHECK_INTERVAL = 0.5
"""Seconds between two checks of the deadlines of all connections."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of one server. Times are in seconds."""

    connections: int = 8192
    """Open connections. Beyond them the longest idle one is closed; if none is idle, requests are refused with 503."""
    idle_time: float = 65.0
    """Time without a request; longer than load balancers and HTTP libraries keep a connection."""
    header_time: float = 10.0
    """Time from the first byte of a request to the end of its header."""
    header_bytes: int = 64 * 1024
    """Bytes of a header, or of the trailer of a chunked body."""
    headers: int = 128
    """Lines of a header."""
    body_time: float = 10.0
    """Time in which a body must end or bring `body_step` bytes more."""
    body_step: int = 64 * 1024
    """Bytes that prolong the time of a body."""
    bodies: int = 256 * 1024 * 1024
    """Bytes of the bodies of all requests without an answer. Beyond them the oldest unfinished body is refused."""
    discard_time: float = 5.0
    """Time in which a refused body is read and dropped, so that its sender reads the answer."""
    write_time: float = 120.0
    """Time in which the client must read what waits in a full buffer."""
    close_time: float = 5.0
    """Time in which the client must read the rest after the end."""


class _Reading(Enum):
    """The part of a request that is read next."""

    NOTHING = auto()
    """No request has begun: the first byte of one is awaited."""
    HEADER = auto()
    BODY = auto()
    DISCARDED_BODY = auto()
    """The rest of a body whose request has been answered already."""
    END = auto()
    """All bytes until the client has read a refusal are dropped."""


class Connections:
    """All connections of one server.

    Attributes:
        limits: limits of the server.
        open: connections that count toward the limit.
        closing: connections that were closed to make room, and whose clients have not read the rest yet.
        idle_time: seconds that a connection may be idle.
        idle: connections without a complete header, and refused ones; longest idle first.
        uploading: connections with an unfinished body, oldest first.
        body_bytes: bytes of the bodies of all requests without an answer.
        refused: connections closed and requests refused because of a limit so far.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.idle_time = limits.idle_time
        self.open: set[LimitedProtocol] = set()
        self.closing: set[LimitedProtocol] = set()
        self.idle: dict[LimitedProtocol, None] = {}
        self.uploading: dict[LimitedProtocol, None] = {}
        self.body_bytes = 0
        self.refused = 0

    def add(self, connection: "LimitedProtocol") -> None:
        """Adds a new connection; if there are too many, closes those that have been idle longest."""
        self.open.add(connection)
        while self.full and self.idle:
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            self.open.remove(oldest)
            self.closing.add(oldest)
            self.refused += 1
            oldest.transport.close()
        self.idle[connection] = None

    def abort(self) -> None:
        """Ends all connections at once."""
        for connection in [*self.open, *self.closing]:
            connection.transport.abort()

    def hurry(self) -> None:
        """Closes idle connections after `LAST_IDLE_TIME` from now on."""
        self.idle_time = min(LAST_IDLE_TIME, self.idle_time)
        for connection in self.idle:
            connection.hurry()

    def remove(self, connection: "LimitedProtocol") -> None:
        """Forgets a connection that has ended."""
        self.open.discard(connection)
        self.closing.discard(connection)
        self.idle.pop(connection, None)
        self.uploading.pop(connection, None)

    @property
    def full(self) -> bool:
        """Whether there are more connections than allowed."""
        return len(self.open) > self.limits.connections

    def make_room(self) -> None:
        """Refuses the oldest unfinished bodies while there are too many bytes of bodies."""
        while self.body_bytes > self.limits.bodies and self.uploading:
            oldest = next(iter(self.uploading))
            oldest.refuse(503, "unavailable", "too many large requests are arriving: send the request again later")

    async def enforce(self) -> None:
        """Closes connections whose time is over, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_INTERVAL)
            now = loop.time()
            for connection in [*self.open, *self.closing]:
                connection.check(now)


class LimitedProtocol(HttpToolsProtocol):
    """One connection. uvicorn's parser calls the methods that begin with `on_`."""

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], connections: Connections
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.url = b""  # uvicorn sets it with the first byte of a request, which line breaks are not
        self._connections = connections
        self._limits = connections.limits
        self._reading = _Reading.NOTHING
        self._deadline: float | None = None
        """Time of the loop at which what is read must have come; None: it may take any time."""
        self._header_bytes = self._header_lines = 0
        """Size of the header so far."""
        self._calls = 0
        """Calls of the parser so far."""
        self._unparsed = 0
        """Bytes since the last call: the parser holds them."""
        self._step_bytes = 0
        """Bytes of the body since its time was last prolonged."""
        self._bodies: deque[int] = deque()
        """Bytes of the body of each request without an answer, oldest first."""
        self._answering: RequestResponseCycle | None = None
        """The request that is being answered; uvicorn's `cycle` is the last one whose header has been read."""
        self._paused_at: float | None = None
        """Time of the loop at which the client stopped reading."""
        self._closing_at: float | None = None
        """Time of the loop at which the connection was seen to close."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the time that the connection may be idle."""
        super().connection_made(transport)
        self._connections.add(self)
        self._deadline = self.loop.time() + self._connections.idle_time

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self._connections.remove(self)
        self._release_bodies()
        super().connection_lost(exc)
        self._disconnect()

    def data_received(self, data: bytes) -> None:
        """Parses what has arrived; refuses a line that the parser has collected for too long."""
        if self._over:
            return
        calls = self._calls
        self._unset_keepalive_if_required()
        self._parse(data)
        self._unparsed = 0 if self._calls != calls else self._unparsed + len(data)
        if self._unparsed > self._limits.header_bytes:
            self._refuse_header()

    def on_message_begin(self) -> None:
        """Starts the time of the header."""
        self._calls += 1
        if self._over:
            return
        self._reading = _Reading.HEADER
        self._header_bytes = self._header_lines = 0
        self._deadline = None if self._responding else self.loop.time() + self._limits.header_time
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Takes a part of the target."""
        self._calls += 1
        if self._over:
            return
        self._header_bytes += len(url)
        super().on_url(url)
        self._check_header()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a line of a header, or of a trailer."""
        self._calls += 1
        if self._over:
            return
        self._header_bytes += len(name) + len(value)
        self._header_lines += 1
        if self._reading == _Reading.HEADER:
            super().on_header(name, value)
        self._check_header()

    def on_headers_complete(self) -> None:
        """Starts the time of the body, and the request unless there are too many connections."""
        self._calls += 1
        if self._over or self.parser.should_upgrade():  # `_parse` has the header parsed again
            return
        version, hosts = self.parser.get_http_version(), sum(name == b"host" for name, _ in self.headers)
        if version not in {"1.0", "1.1"} or (version == "1.1" and hosts != 1):
            self.refuse(400, "invalid_request", "this is no request of HTTP/1.1 with one Host header, nor of HTTP/1.0")
            return
        self._header_bytes = self._header_lines = self._step_bytes = 0
        self._reading = _Reading.BODY
        self._deadline = self.loop.time() + self._limits.body_time
        self._connections.idle.pop(self, None)
        if self._connections.full:
            self.refuse(503, "unavailable", "there are too many connections: send the request again later")
            return
        super().on_headers_complete()
        if version == "1.0":
            self.cycle.__class__ = UnchunkedCycle  # uvicorn creates it, and starts it later
        self._bodies.append(0)
        if not self.pipeline:
            self._answering = self.cycle

    def on_body(self, body: bytes) -> None:
        """Takes a part of the body."""
        self._calls += 1
        if self._reading == _Reading.DISCARDED_BODY or self._over:
            return
        super().on_body(body)
        self._step_bytes += len(body)
        if self._step_bytes >= self._limits.body_step:
            self._step_bytes = 0
            self._deadline = self.loop.time() + self._limits.body_time
        self._bodies[-1] += len(body)
        self._connections.uploading[self] = None
        self._connections.body_bytes += len(body)
        self._connections.make_room()

    def on_message_complete(self) -> None:
        """Ends the time of the body."""
        self._calls += 1
        if self._over or self.parser.should_upgrade():
            return
        self._connections.uploading.pop(self, None)
        discarded = self._reading == _Reading.DISCARDED_BODY
        self._reading = _Reading.NOTHING
        self._deadline = None
        super().on_message_complete()
        if discarded:
            self._await_request()

    def on_response_complete(self) -> None:
        """Starts the time of the next part: a request, its rest, or the rest of a refused body."""
        if self._bodies:
            self._connections.body_bytes -= self._bodies.popleft()
        if not self.pipeline:
            self._connections.uploading.pop(self, None)
        now = self.loop.time()
        self._answering = self.pipeline[-1][0] if self.pipeline else None
        if self.pipeline:  # the header of the next request has been read already
            self._deadline = now + self._limits.body_time if self._reading == _Reading.BODY else None
        elif self._reading == _Reading.HEADER:
            self._deadline = now + self._limits.header_time
        elif self._reading == _Reading.NOTHING:
            self._await_request()
        elif self.expect_100_continue:
            self.transport.close()  # the client will not send the body, but perhaps its next request
        else:
            self._reading = _Reading.DISCARDED_BODY
            self._deadline = now + self._limits.discard_time
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Notes that the client does not read."""
        self._paused_at = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Notes that the client has read."""
        self._paused_at = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuses bytes that the parser does not understand."""
        self.refuse(400, "invalid_request", "this is not an HTTP request")

    def hurry(self) -> None:
        """Shortens the time that the connection may be idle."""
        if self._reading == _Reading.NOTHING and self._deadline is not None:
            self._deadline = min(self._deadline, self.loop.time() + self._connections.idle_time)

    def check(self, now: float) -> None:
        """Ends the connection if its time is over."""
        if self.transport.is_closing():
            self._closing_at = self._closing_at or now
            if now > self._closing_at + self._limits.close_time:
                self.transport.abort()
        elif self._paused_at is not None and now > self._paused_at + self._limits.write_time:
            self._connections.refused += 1
            self.transport.abort()
        elif self._deadline is not None and now > self._deadline:
            if self._reading == _Reading.HEADER:
                self.refuse(408, "deadline_exceeded", "the header of the request took too long")
            elif self._reading != _Reading.BODY:
                self.transport.close()
            elif not self.pipeline:  # else the body waits for the answer to an earlier request
                self.refuse(408, "deadline_exceeded", "the body of the request came too slowly")

    def refuse(self, status: int, code: str, message: str) -> None:
        """Answers with an error, unless an answer has begun, and closes the connection."""
        self._connections.uploading.pop(self, None)
        self._release_bodies()
        if self._over:
            return
        self._connections.idle[self] = None
        self._connections.refused += 1
        if self._answering is None or not self._answering.response_started:
            content = errors.body(status, code, message, self.url.decode("latin-1"))
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head % len(content) + content)
            # If the connection were closed now, what is still on its way would reset it, and the answer be lost.
            self._reading = _Reading.END
            self._deadline = self.loop.time() + self._limits.close_time
            if self.transport.can_write_eof():
                self.transport.write_eof()
        else:
            self.transport.close()
        self._disconnect()

    def _parse(self, data: bytes) -> None:
        """Has the parser read what has arrived. Offers to speak another protocol are ignored (RFC 9110, 7.8)."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except HttpParserUpgrade as upgrade:
                rest = data[upgrade.args[0] :]
                data = b"" if self._over else self._declined() + rest
            except HttpParserError:
                self.send_400_response("")
                return

    def _declined(self) -> bytes:
        """Returns the header of a request without its offer of another protocol, and replaces the parser: one that has
        seen an offer reads no body. Empty if the request is refused."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("")
            return b""
        head = without_offer(method, self.url, self.parser.get_http_version(), self.headers)
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        return head

    @property
    def _over(self) -> bool:
        """Whether all further bytes are dropped."""
        return self._reading == _Reading.END or self.transport.is_closing()

    @property
    def _responding(self) -> bool:
        return self._answering is not None

    def _disconnect(self) -> None:
        """Tells the application that nobody waits for its answer."""
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.waiting_for_100_continue = False
            self._answering.message_event.set()

    def _await_request(self) -> None:
        self._deadline = self.loop.time() + self._connections.idle_time
        self._connections.idle[self] = None

    def _check_header(self) -> None:
        if self._header_bytes > self._limits.header_bytes or self._header_lines > self._limits.headers:
            self._refuse_header()

    def _refuse_header(self) -> None:
        limits = self._limits
        self.refuse(
            431, "invalid_request", f"a header may have {limits.headers} lines and {limits.header_bytes} bytes at most"
        )

    def _release_bodies(self) -> None:
        self._connections.body_bytes -= sum(self._bodies)
        self._bodies.clear()
