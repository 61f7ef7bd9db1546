"""The gateway: batches of deltas of many streams in, server-sent events of `/v1/completions` out."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from starlette.types import ASGIApp
from starlette.types import Message as Event
from typing_extensions import override

from pagewire import AsyncClient
from pagewire.bench._costs.rig import ROWS, Rig
from pagewire.bench._costs.tap import Tap, Wrap
from pagewire.services.gateway import app
from pagewire.services.gateway.metrics.metrics_page import MetricsPage
from pagewire.services.gateway.routes.completions import Completions
from pagewire.services.gateway.routes.endpoint import Endpoint
from pagewire.services.gateway.routes.health import Health
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.client_protocol.frame_encoding import encode_frame
from pagewire.shared.messages.client import Accepted, Delta, DeltaBatch
from pagewire.shared.messages.client_headers import BATCH_INBOX
from pagewire.shared.messages.open import Encoding

_MODEL = "tiny"
_PATH = "/v1/completions"
_WORDS = ("once ", "upon ", "a ", "time ", "there ", "was ", '"quoted" ', "line\n")


class _Readers(Rig):
    """Clients over HTTP, each with a stream that grows by one token per turn."""

    per_message = float(ROWS)

    def __init__(self, application: ASGIApp, tap: Tap) -> None:
        self.inboxes: list[str] = []
        self.batch_inbox = ""
        self.sent = 0
        """Server-sent events of this turn."""
        self._application = application
        self._tap = tap
        self._start = 0
        self._message = Message("", b"")

    async def read(self) -> None:
        """Sends a request and reads its stream until cancelled."""
        body = {"model": _MODEL, "prompt": "x", "max_tokens": 2000, "stream": True}
        coming: list[Event] = [{"type": "http.request", "body": msgspec.json.encode(body)}]

        async def receive() -> Event:
            if not coming:
                await asyncio.get_running_loop().create_future()  # the client stays
            return coming.pop()

        async def send(event: Event) -> None:
            self.sent += event.get("body", b"").count(b"data: ")
            self._tap.progress.notify()

        scope = {"type": "http", "method": "POST", "path": _PATH, "query_string": b"", "headers": []}
        await self._application(scope, receive, send)

    @override
    def prepare(self) -> None:
        self.sent = 0
        delta = Delta(0, self._start, _WORDS[self._start % len(_WORDS)], [500 + self._start])
        batch = DeltaBatch(self.inboxes, [delta] * len(self.inboxes))
        self._message = Message(self.batch_inbox, encode_frame(batch, Encoding.MSGPACK))
        self._start += 1

    @override
    async def turn(self) -> float:
        self._tap.feed(self.batch_inbox, self._message)
        await self._tap.progress.until(lambda: self.sent == ROWS)
        return ROWS


@asynccontextmanager
async def gateway(wrap: Wrap) -> AsyncIterator[Rig]:
    """Opens a gateway with `ROWS` streams. The unit is a token."""
    broker = MemoryBroker()
    tap, peer = Tap(broker, out=subjects.CANCEL, wrap=wrap, inbox_prefix="_INBOX"), MemoryBus(broker)
    client = AsyncClient(bus=tap)
    health = Health(tap, lambda: None)
    endpoints = {_PATH: Endpoint(Completions(), client, tap.max_payload)}
    rig = _Readers(app.build(client, endpoints, health, MetricsPage(tap, vllm=False)), tap)

    def on_generate(message: Message) -> None:
        accepted = Accepted("r", subjects.CANCEL, subjects.RESUME, 1)
        peer.publish(message.reply, encode_frame(accepted, Encoding.MSGPACK))
        rig.inboxes.append(message.reply)
        rig.batch_inbox = message.headers[BATCH_INBOX]
        tap.progress.notify()

    await peer.subscribe(f"{subjects.GENERATE}.{_MODEL}", on_generate)
    tasks = [asyncio.create_task(rig.read()) for _ in range(ROWS)]
    try:
        await tap.progress.until(lambda: len(rig.inboxes) == ROWS)
        yield rig
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
