"""The tokenizer: requests with text prompts in, work items out."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from typing_extensions import override

from pagewire.bench._costs.progress import Progress
from pagewire.bench._costs.rig import Rig, serving
from pagewire.bench._costs.tap import Tap, Wrap
from pagewire.services.tokenizer.service import Tokenizer
from pagewire.shared import subjects
from pagewire.shared.bus import Headers, Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.bus.memory_store import MemoryStore
from pagewire.shared.messages import Decoder, encode, unpack
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.open import Opened, OpenState
from pagewire.shared.messages.work import WorkItem
from pagewire.shared.process.context import Context
from pagewire.shared.settings.config import Settings

_SENTENCE = "The old man looked at the sea, and number {} asked him what the fish of that summer had been like. "
_GENERATE = f"{subjects.GENERATE}.*"
_work = Decoder(WorkItem)


class _Store(MemoryStore):
    """Keeps work items in a list instead of a queue; the rig empties it."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(max_payload=1 << 20, ack_wait=2.0, done_age=120.0)
        self._progress = progress
        self.work: list[bytes] = []

    @override
    async def put_work(self, queue: str, data: bytes, *, headers: Headers | None = None) -> int:
        self.work.append(data)
        self._progress.notify()
        return len(self.work)


class _Clients(Rig):
    """Clients whose requests differ in a few words."""

    def __init__(self, tap: Tap, peer: MemoryBus, store: _Store, requests: int, sentences: int) -> None:
        """A turn has `requests` requests, each of as many `sentences`."""
        self.per_message = 1.0
        self._tap = tap
        self._peer = peer
        self._store = store
        self._requests = requests
        self._sentences = sentences
        self._number = 0
        self._messages: list[Message] = []

    def beat(self) -> None:
        """Sends a detokenizer's heartbeat."""
        beat = Heartbeat("detokenizer", "detok", True, 0, 0, 0, {})
        self._peer.publish(f"{subjects.HEARTBEAT}.detokenizer.detok", encode(beat))

    async def count_tokens(self) -> int:
        """Returns the tokens of a prompt."""
        self.prepare()
        await self.turn()
        return len(unpack(_work.decode(self._store.work[0]).prompts[0]))

    @override
    def prepare(self) -> None:
        self.beat()
        self._store.work.clear()
        self._messages = [self._request() for _ in range(self._requests)]

    @override
    async def turn(self) -> float:
        for message in self._messages:
            self._tap.feed(_GENERATE, message)
        await self._tap.progress.until(lambda: len(self._store.work) == self._requests)
        return self.per_message * self._requests

    def _request(self) -> Message:
        """Returns a request whose numbers have three digits, so that all prompts have as many tokens."""
        self._number += 1
        text = "".join(_SENTENCE.format(100 + (self._number + i) % 900) for i in range(self._sentences))
        body = msgspec.json.encode({"prompt": text, "stream": True, "sampling": {"max_tokens": 64, "temperature": 0.7}})
        return Message(f"{subjects.GENERATE}.bundled", body, reply=f"_INBOX.client.{self._number}")


@asynccontextmanager
async def tokenizer(wrap: Wrap) -> AsyncIterator[Rig]:
    """Opens a tokenizer that takes long prompts. The unit is a token of them."""
    async with _clients(wrap, requests=1, sentences=60) as rig:
        rig.per_message = float(await rig.count_tokens())
        yield rig


@asynccontextmanager
async def tokenizer_request(wrap: Wrap) -> AsyncIterator[Rig]:
    """Opens a tokenizer that takes short prompts. The unit is a request."""
    async with _clients(wrap, requests=16, sentences=1) as rig:
        yield rig


@asynccontextmanager
async def _clients(wrap: Wrap, requests: int, sentences: int) -> AsyncIterator[_Clients]:
    broker = MemoryBroker()
    tap, peer = Tap(broker, out=subjects.WORK, wrap=wrap), MemoryBus(broker)
    broker.store = store = _Store(tap.progress)
    rig = _Clients(tap, peer, store, requests, sentences)

    def on_open(message: Message) -> None:
        peer.publish(message.reply, encode(Opened(OpenState.OPENED)))

    await peer.subscribe(f"{subjects.DETOKENIZER}.detok.open", on_open)
    service = Tokenizer(Context(Settings(model="bundled"), tap, "tok", tap.progress.notify))
    async with serving(service, tap.progress, lambda: "requests" in service.heartbeat().load):
        yield rig
