"""A detokenizer on the in-memory bus, between a client, a tokenizer, a scheduler and an executor made of paper."""

import asyncio
import lzma
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pagewire.services.detokenizer.service import Detokenizer
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.bus.memory_store import MemoryStore
from pagewire.shared.messages import Decoder, Wire, encode, pack, unpack
from pagewire.shared.messages.abort import AbortedSequences, AbortReason, AbortSequences
from pagewire.shared.messages.attach import Attach, Attached
from pagewire.shared.messages.client import Accepted, CancelReply, Delta, ErrorFrame, Final, Frame, Queued, Result
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.messages.open import AbortStream, Encoding, Opened, OpenState, OpenStream, StoredWork
from pagewire.shared.messages.plan import Replay
from pagewire.shared.messages.step import Finish, StepOutput
from pagewire.shared.process.context import Context, Drain
from pagewire.shared.process.heartbeater import Heartbeater
from pagewire.shared.settings.config import Settings
from tests.support.tokenizers import FILES, token_id, tokenizer
from tests.support.waiting import PATIENCE, until

PROMPT = 5
"""Length of every prompt."""
END = token_id("gpt2", "<|endoftext|>")
REQUEST = OpenStream(
    request_id="r1",
    digest=b"digest",
    reply="",
    encoding=Encoding.JSON,
    stream=True,
    prompts=(b"",),
    prompt_lengths=pack([PROMPT]),
    n=1,
    stop=(),
    stop_token_ids=(),
    include_stop=False,
    skip_special=True,
    min_tokens=0,
    timeout_ms=60_000,
    secret=bytes(range(16)),
)
KEY = REQUEST.secret.hex()
"""Last token of the subjects that cancel and resume a stream."""


def ids(text: str) -> list[int]:
    return tokenizer("gpt2").encode(text).ids


HELLO = ids("Hello world, and 🦙 again!")


class Reader:
    """A client's inbox and what came to it."""

    def __init__(self, bus: MemoryBus, encoding: Encoding) -> None:
        self.inbox = bus.new_inbox()
        self.messages: list[Message] = []
        self._decoder = (msgspec.msgpack if encoding == Encoding.MSGPACK else msgspec.json).Decoder(Frame)

    def receive(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message.data for message in self.messages]

    @property
    def frames(self) -> list[Frame]:
        return [self._decoder.decode(data) for data in self.bodies if data]

    @property
    def deltas(self) -> list[Delta]:
        return [frame for frame in self.frames if isinstance(frame, Delta)]

    @property
    def accepted(self) -> Accepted:
        return next(frame for frame in self.frames if isinstance(frame, Accepted))

    @property
    def queued(self) -> int:
        return sum(isinstance(frame, Queued) for frame in self.frames)

    @property
    def last(self) -> Final | Result | ErrorFrame | None:
        ends = [frame for frame in self.frames if isinstance(frame, Final | Result | ErrorFrame)]
        return ends[-1] if ends else None

    @property
    def over(self) -> bool:
        return bool(self.messages) and not self.messages[-1].data

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    async def end(self) -> Final:
        """The last frame of a stream, which ended well."""
        await until(lambda: self.over)
        assert isinstance(self.last, Final)
        return self.last

    async def result(self) -> Result:
        """The one reply of a request without a stream."""
        await until(lambda: self.messages)
        assert len(self.messages) == 1
        assert isinstance(self.last, Result)
        return self.last

    async def error(self) -> ErrorFrame:
        await until(lambda: self.last)
        assert isinstance(self.last, ErrorFrame)
        return self.last


@dataclass
class Rig:
    broker: MemoryBroker
    bus: MemoryBus
    """Bus of the other services."""
    client: MemoryBus
    service: Detokenizer
    heartbeater: Heartbeater
    detokenizer: str = "d1"
    aborted: list[tuple[list[int], AbortReason]] = field(default_factory=list)
    """Sequences that the scheduler was asked to abort, with the reason of each message."""
    ring: dict[int, bytes] = field(default_factory=dict)
    """Steps that the executor can send again."""
    ended_items: list[str] = field(default_factory=list)
    """Acknowledgements that were sent to the work queue."""
    replays: list[Replay] = field(default_factory=list)
    may_fail: bool = False
    """Whether the service may end with an error."""
    serving: "asyncio.Task[None] | None" = None
    _next_step: int = 0

    async def reader(self, encoding: Encoding = Encoding.JSON) -> Reader:
        reader = Reader(self.client, encoding)
        await self.client.subscribe(reader.inbox, reader.receive)
        return reader

    async def ask(self, verb: str, message: Wire) -> Message:
        return await self.bus.request(f"{subjects.DETOKENIZER}.{self.detokenizer}.{verb}", encode(message), timeout=2)

    async def open_for(self, reader: Reader, *, stored: bool = True, **values: Any) -> OpenState:
        request = msgspec.structs.replace(REQUEST, reply=reader.inbox, **values)
        state = OpenState(Decoder(Opened).decode((await self.ask("open", request)).data).state)
        if stored and state == OpenState.OPENED:
            await self.ask("stored", StoredWork(request.request_id))
        return state

    async def open(self, encoding: Encoding = Encoding.JSON, **values: Any) -> Reader:
        """Opens a stream for a new reader."""
        reader = await self.reader(encoding)
        assert await self.open_for(reader, encoding=encoding, **values) == OpenState.OPENED
        return reader

    async def attach(self, tokens: tuple[list[int], ...] = ([],), **values: Any) -> Attached:
        attach = Attach(
            request_id="r1",
            term=1,
            generation=1,
            scheduler="s1",
            executor="e1",
            ack="$JS.ACK.memory.m.0.1",
            first_sequence=100,
            tokens=tuple(map(pack, tokens)),
        )
        return Decoder(Attached).decode((await self.ask("attach", msgspec.structs.replace(attach, **values))).data)

    async def abort(self, request_id: str, error: str, message: str) -> None:
        await self.ask("abort", AbortStream(request_id, error, message))

    def step(
        self,
        *rows: tuple[int, int, int, Finish],
        step: int | None = None,
        term: int = 1,
        executor: str = "e1",
        lost: bool = False,
    ) -> None:
        """Publishes a step of rows (sequence, position of the token in its completion, token, finish)."""
        number = self._next_step if step is None else step
        self._next_step = number + 1
        output = StepOutput(
            term=term,
            step=number,
            plan=1,
            sequences=pack(row[0] for row in rows),
            starts=pack(PROMPT + row[1] - 1 if row[1] else 0 for row in rows),
            counts=pack(1 if row[1] else PROMPT for row in rows),
            tokens=pack(row[2] for row in rows),
            finishes=bytes(row[3] for row in rows),
            elapsed_us=1,
        )
        self.ring[number] = encode(output)
        if not lost:
            self.publish(output, executor)

    def publish(self, output: StepOutput, executor: str = "e1") -> None:
        """A step, as an executor publishes it."""
        self.bus.publish(f"{subjects.STEPS}.{executor}", encode(output))

    def generate(self, tokens: list[int], finish: Finish = Finish.NONE, *, start: int = 0, sequence: int = 100) -> None:
        """One step per token."""
        for position, token in enumerate(tokens, start):
            last = position == start + len(tokens) - 1
            self.step((sequence, position, token, finish if last else Finish.NONE))

    def beat(self, step: int, term: int = 1, executor: str = "e1") -> None:
        """The executor says how far it is."""
        beat = Heartbeat("executor", executor, True, term, 1, step, {})
        self.bus.publish(f"{subjects.HEARTBEAT}.executor.{executor}", encode(beat))

    def scheduler_beat(self, scheduler: str, *, draining: bool = False) -> None:
        """A scheduler says that it lives."""
        beat = Heartbeat("scheduler", scheduler, True, 1, 1, 1, {}, draining=draining)
        self.bus.publish(f"{subjects.HEARTBEAT}.scheduler.{scheduler}", encode(beat))

    def scheduler_ended(self, scheduler: str) -> None:
        """The supervisor says that the process of a scheduler has ended."""
        self.bus.publish(f"{subjects.HEARTBEAT}.scheduler.{scheduler}", b"")

    async def cancel(self, subject: str) -> str:
        reply = await self.client.request(subject, b"", timeout=2)
        return msgspec.json.decode(reply.data, type=CancelReply).state

    async def resume(self, subject: str, start: int) -> Reader:
        reader = await self.reader()
        self.client.publish(subject, msgspec.json.encode({"start": start}), reply=reader.inbox)
        return reader

    async def store_item(self) -> str:
        """Puts an item into the work queue and takes it out; its acknowledgement subject."""
        await self.broker.store.put_work("m", b"item")
        (item,) = await self.broker.store.pull_work("m", 1, expires=1)
        return item.ack

    @property
    def load(self) -> dict[str, float]:
        return self.heartbeat.load

    @property
    def has_peer(self) -> bool:
        """Whether the service knows of another detokenizer that takes streams."""
        return self.service._adopter.has_peer

    @property
    def heartbeat(self) -> Heartbeat:
        """The heartbeat that others get from the service now."""
        return self.heartbeater.beat_of(self.service)

    async def drain(self) -> None:
        """Drains the service, as SIGTERM does."""
        self.heartbeater.drain()
        await self.service.drain()

    async def serve(self) -> None:
        """The scheduler and the executor listen, and the queue keeps a list."""
        self.broker.store.end_work = self._end_work  # type: ignore[method-assign]
        await self.bus.subscribe(f"{subjects.ABORT}.s1.abort", self._on_abort)
        await self.bus.subscribe(f"{subjects.REPLAY}.e1", self._on_replay)

    async def _end_work(self, ack: str) -> None:
        await MemoryStore.end_work(self.broker.store, ack)
        self.ended_items.append(ack)

    def _on_abort(self, message: Message) -> None:
        abort = Decoder(AbortSequences).decode(message.data)
        self.aborted.append((unpack(abort.sequences), AbortReason(abort.reason)))
        self.bus.publish(message.reply, encode(AbortedSequences(1)))

    def _on_replay(self, message: Message) -> None:
        replay = Decoder(Replay).decode(message.data)
        self.replays.append(replay)
        for step in range(replay.first, replay.last + 1):
            if step in self.ring:
                self.bus.publish(message.reply, self.ring[step])
        self.bus.publish(message.reply, b"")


@asynccontextmanager
async def rig(
    folder: Path,
    *,
    broker: MemoryBroker | None = None,
    wrap: Callable[[MemoryBus], MemoryBus] = lambda bus: bus,
    instance: str = "d1",
    follows: Drain = Drain.ALONE,
) -> AsyncIterator[Rig]:
    """A running detokenizer of the model in `folder`, for at most 20 s. `wrap` may put something around its bus.

    Several of one broker get each other's heartbeats; the scheduler and the executor of paper are those of the first.
    """
    broker = broker or MemoryBroker()
    bus = MemoryBus(broker)
    heartbeater = Heartbeater(bus, "detokenizer", instance)
    service = Detokenizer(
        Context(Settings(model=str(folder)), wrap(bus), instance, heartbeater.announce, lambda: follows)
    )
    world = Rig(broker, MemoryBus(broker), MemoryBus(broker, inbox_prefix="_INBOX"), service, heartbeater, instance)
    if instance == "d1":
        await world.serve()
    world.serving = serving = asyncio.create_task(service.run())
    heartbeats = asyncio.create_task(heartbeater.run(service))
    try:
        async with asyncio.timeout(PATIENCE):
            await until(lambda: service.heartbeat().ready or serving.done())
            yield world
    finally:
        heartbeats.cancel()
        serving.cancel()
        await asyncio.wait({serving})
        for connection in (bus, world.bus, world.client):
            await connection.close()
        if not serving.cancelled() and not world.may_fail:
            serving.result()


def write_model(folder: Path) -> Path:
    """A model folder with gpt2's tokenizer and nothing else."""
    (folder / "tokenizer.json").write_bytes(lzma.decompress(FILES["gpt2"].read_bytes()))
    (folder / "config.json").write_text('{"max_position_embeddings": 1024}')
    return folder


def step_of(
    tokens: Sequence[int], finish: Finish = Finish.NONE, *, step: int = 0, accepted: int = 0, start: int = 0
) -> StepOutput:
    """A step with one row, of sequence 100, which has all `tokens`; `accepted` of them were drafted."""
    return StepOutput(
        term=1,
        step=step,
        plan=1,
        sequences=pack([100]),
        starts=pack([PROMPT + start - 1 if start else 0]),
        counts=pack([1 if start else PROMPT]),
        tokens=pack(tokens),
        finishes=bytes([finish]),
        elapsed_us=1,
        token_counts=pack([len(tokens)]),
        drafts=pack([100, 2, accepted]) if accepted else b"",
    )


async def finish_hello(world: Rig) -> None:
    """Runs the open request to its end."""
    await world.attach()
    world.generate(HELLO, Finish.LENGTH)
    await until(lambda: world.load["streams"] == 0)
