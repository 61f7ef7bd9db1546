"""A tokenizer service on the in-memory bus, a detokenizer with scripted answers, and a client."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import msgspec

from pagewire.services.tokenizer.service import Tokenizer
from pagewire.shared import subjects
from pagewire.shared.bus import Item, Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages import Decoder, encode
from pagewire.shared.messages.client import ErrorFrame
from pagewire.shared.messages.heartbeat import AWAITS_SUCCESSOR, Heartbeat
from pagewire.shared.messages.open import AbortStream, Opened, OpenState, OpenStream, StoredWork
from pagewire.shared.messages.work import WorkItem
from pagewire.shared.process import peers
from pagewire.shared.process.context import Context, Drain
from pagewire.shared.settings.config import Settings
from tests.support.waiting import PATIENCE

MODEL = "bundled"
QUEUE = subjects.work_queue(MODEL, 0, subjects.ANY)
GENERATE = f"{subjects.GENERATE}.{MODEL}"

_open = Decoder(OpenStream)
_abort = Decoder(AbortStream)
_stored = Decoder(StoredWork)
_work = Decoder(WorkItem)


@dataclass
class FakeDetokenizer:
    """Answers `open` with `state`, or not at all, and notes what it hears in order."""

    bus: MemoryBus
    instance: str = "detok1"
    state: OpenState = OpenState.OPENED
    deaf: bool = False
    """Neither `open` nor `abort` is answered."""
    opened: list[OpenStream] = field(default_factory=list)
    aborted: list[AbortStream] = field(default_factory=list)
    told_stored: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    stored_at_open: list[bool] = field(default_factory=list)
    """Whether the queue held the work when `open` arrived."""
    answers_open: bool = True

    async def start(self) -> "FakeDetokenizer":
        await self.bus.subscribe(f"{subjects.DETOKENIZER}.{self.instance}.*", self._hear)
        self.beat()
        await self.bus.flush()
        return self

    def beat(self, *, ready: bool = True, draining: bool = False, awaits_successor: bool = False) -> None:
        load = {AWAITS_SUCCESSOR: float(awaits_successor)}
        beat = Heartbeat("detokenizer", self.instance, ready, 0, 0, 0, load, draining=draining)
        self.bus.publish(f"{subjects.HEARTBEAT}.detokenizer.{self.instance}", encode(beat))

    def _hear(self, message: Message) -> None:
        if message.subject.endswith(".open"):
            self.opened.append(_open.decode(message.data))
            self.headers.append(dict(message.headers))
            if not self.deaf and self.answers_open:
                self.bus.publish(message.reply, encode(Opened(self.state)))
        elif message.subject.endswith(".stored"):
            self.told_stored.append(_stored.decode(message.data).request_id)
        elif message.subject.endswith(".abort"):
            self.aborted.append(_abort.decode(message.data))
            if not self.deaf:
                self.bus.publish(message.reply, b"")


@dataclass
class Setup:
    """The tokenizer under test and its surroundings."""

    broker: MemoryBroker
    tokenizer: Tokenizer
    detokenizer: FakeDetokenizer
    client: MemoryBus
    announced: list[bool]
    """`ready` of each heartbeat that was announced."""

    async def ask(self, body: object, *, subject: str = GENERATE, headers: dict[str, str] | None = None) -> Message:
        """The first reply to a request in JSON, or in bytes as they are."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return await self.client.request(subject, data, timeout=PATIENCE, headers=headers)

    async def refused(self, body: object, *, subject: str = GENERATE) -> ErrorFrame:
        """The error frame that answers a request in JSON."""
        reply = await self.ask(body, subject=subject)
        frame = msgspec.json.decode(reply.data, type=ErrorFrame)
        assert reply.headers["Nats-Service-Error-Code"] == str(frame.code)
        assert reply.headers["Nats-Service-Error"]
        return frame

    async def send(
        self, body: object, headers: dict[str, str] | None = None, queue: str = QUEUE
    ) -> tuple[WorkItem, Item]:
        """Sends a request that is expected to be stored; the work, and its delivery."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        self.client.publish(GENERATE, data, reply=self.client.new_inbox(), headers=headers)
        (item,) = await self.client.store.pull_work(queue, 1, expires=5)
        return _work.decode(item.data), item

    async def stored(self) -> int:
        """Number of items that wait in the queue."""
        return len(await self.client.store.pull_work(QUEUE, 100, expires=0.01))

    async def until_idle(self) -> None:
        """Returns once no request is in progress."""
        async with asyncio.timeout(PATIENCE):
            while self.tokenizer.heartbeat().load["in_flight"]:
                await self.client.flush()


@asynccontextmanager
async def serving(
    settings: Settings | None = None,
    *,
    max_payload: int = 1 << 20,
    broker: MemoryBroker | None = None,
    follows: Drain = Drain.ALONE,
) -> AsyncIterator[Setup]:
    """Runs the service until the block ends. The only heartbeat of the detokenizer counts for all that time."""
    broker = broker or MemoryBroker(max_payload=max_payload)
    announced: list[bool] = []
    ready = asyncio.Event()

    def announce() -> None:
        announced.append(tokenizer.heartbeat().ready)
        ready.set()

    tokenizer = Tokenizer(
        Context(settings or Settings(model="bundled"), MemoryBus(broker), "tok1", announce, lambda: follows)
    )
    task = asyncio.create_task(tokenizer.run())
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        task.result()
    detokenizer = await FakeDetokenizer(MemoryBus(broker)).start()
    try:
        with patch.object(peers, "SILENCE", 3600.0):
            yield Setup(broker, tokenizer, detokenizer, MemoryBus(broker, inbox_prefix="_INBOX"), announced)
    finally:
        task.cancel()
        await asyncio.wait({task})
