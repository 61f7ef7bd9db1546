import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pagewire import AsyncClient
from pagewire.client import stream
from pagewire.shared.bus import Bus
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages.client import Delta, DeltaBatch
from pagewire.shared.messages.client_headers import BATCH_INBOX
from tests.support.broker import connect_service, running_broker
from tests.support.responder import MODEL, WORDS, Responder, deltas, final
from tests.support.waiting import until

TEXT = "".join(WORDS)
pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "FRAME_TIMEOUT", 0.05)
    monkeypatch.setattr(stream, "CHECK_INTERVAL", 0.01)
    monkeypatch.setattr(stream, "RESEND_INTERVAL", 0.01)


class Pipeline(Responder):
    """Answers nothing of its own accord, and can send a batch."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus)
        self.replies: list[str] = []
        self.script = self._note

    def send_batch(self, *parts: tuple[str, Delta]) -> None:
        batch = DeltaBatch([reply for reply, _ in parts], [delta for _, delta in parts])
        self.bus.publish(self.headers[-1][BATCH_INBOX], msgspec.msgpack.encode(batch))

    def end(self, reply: str) -> None:
        self.reply = reply
        self.send(final("", deltas()), None)

    def _note(self, _: object) -> list[Any]:
        self.replies.append(self.reply)
        return []


@pytest.fixture
def memory() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def pipeline(memory: MemoryBroker) -> Pipeline:
    pipeline = Pipeline(MemoryBus(memory))
    await pipeline.start()
    return pipeline


@pytest.fixture
def client(memory: MemoryBroker, pipeline: Pipeline) -> AsyncClient:
    return AsyncClient(model=MODEL, bus=MemoryBus(memory, inbox_prefix="_INBOX"))


async def read(request: stream.Stream) -> list[Delta]:
    return [delta async for delta in request]


async def test_each_stream_gets_its_own_deltas_of_a_batch(client: AsyncClient, pipeline: Pipeline) -> None:
    reading = [asyncio.create_task(read(client.stream("x"))) for _ in range(2)]
    await until(lambda: len(pipeline.replies) == 2)
    inboxes = {headers[BATCH_INBOX] for headers in pipeline.headers}
    assert len(inboxes) == 1
    assert not inboxes & set(pipeline.replies)
    a, b = pipeline.replies
    ours, theirs = deltas(), deltas(words=[word.upper() for word in WORDS])
    for one, other in zip(ours, theirs, strict=True):
        pipeline.send_batch((a, one), ("_INBOX.of.nobody", one), (b, other))
    pipeline.end(a)
    pipeline.end(b)
    assert await asyncio.gather(*reading) == [ours, theirs]


async def test_deltas_may_come_alone_in_batches_and_repeatedly(client: AsyncClient, pipeline: Pipeline) -> None:
    reading = asyncio.create_task(read(client.stream("x")))
    await until(lambda: pipeline.replies)
    (reply,) = pipeline.replies
    parts = deltas()
    pipeline.send(parts[0])
    pipeline.send_batch((reply, parts[0]), (reply, parts[1]), (reply, parts[2]))
    pipeline.send(*parts[2:4])
    pipeline.send_batch((reply, parts[4]))
    pipeline.end(reply)
    assert await reading == parts
    assert pipeline.resumes == []


@pytest.mark.parametrize("lost", [b"\xc1", None])
async def test_the_deltas_of_a_lost_batch_are_requested_again(
    client: AsyncClient, pipeline: Pipeline, lost: bytes | None
) -> None:
    """The batch is unreadable, or does not come at all."""
    reading = asyncio.create_task(read(client.stream("x")))
    await until(lambda: pipeline.replies)
    parts = deltas()
    pipeline.full = [*parts, final("", parts), None]
    pipeline.send_batch((pipeline.replies[0], parts[0]))
    if lost is not None:
        pipeline.bus.publish(pipeline.headers[0][BATCH_INBOX], lost)
    pipeline.send_batch((pipeline.replies[0], parts[3]))
    assert await reading == parts
    assert pipeline.resumes[0] == 1


async def test_a_batch_counts_as_a_frame_of_each_stream(
    client: AsyncClient, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(stream, "time", SimpleNamespace(monotonic=lambda: now))
    got: list[Delta] = []

    async def follow() -> None:
        async for delta in client.stream("x", max_tokens=30):
            got.append(delta)

    reading = asyncio.create_task(follow())
    await until(lambda: pipeline.replies)
    parts = deltas(words=["x"] * 12)
    sent = []
    for part in parts:
        now += 0.04
        pipeline.send_batch((pipeline.replies[0], part))
        sent.append(part)
        await until(lambda: got == sent)
    assert pipeline.resumes == []
    now += 0.06
    await until(lambda: pipeline.resumes)
    pipeline.send(final("", parts), None)
    await reading


async def test_the_inbox_is_open_while_a_stream_reads(client: AsyncClient, pipeline: Pipeline) -> None:
    for _ in range(2):
        pipeline.replies.clear()
        reading = asyncio.create_task(read(client.stream("x")))
        await until(lambda: pipeline.replies)
        for part in deltas():
            pipeline.send_batch((pipeline.replies[-1], part))
        pipeline.end(pipeline.replies[-1])
        assert "".join(part.text for part in await reading) == TEXT
    first, second = (headers[BATCH_INBOX] for headers in pipeline.headers)
    assert first != second


async def test_a_stream_whose_loop_has_ended_gets_no_delta(client: AsyncClient, pipeline: Pipeline) -> None:
    left, kept = client.stream("x"), client.stream("x")
    reading = asyncio.create_task(read(kept))
    await until(lambda: pipeline.replies)
    leaving = asyncio.create_task(anext(aiter(left)))
    await until(lambda: len(pipeline.replies) == 2)
    leaving.cancel()
    await asyncio.wait({leaving})
    for part in deltas():
        pipeline.send_batch((pipeline.replies[1], part), (pipeline.replies[0], part))
    pipeline.end(pipeline.replies[0])
    assert await reading == deltas()
    await until(lambda: pipeline.cancels)


async def test_each_connection_has_an_inbox_of_its_own() -> None:
    """A stream of the first one has not been left yet."""
    with running_broker() as broker:
        pipeline = Pipeline(await connect_service(broker))
        await pipeline.start()
        client = AsyncClient(broker.url, model=MODEL)
        async with client:
            left = aiter(client.stream("x"))
            first = asyncio.create_task(anext(left))
            await until(lambda: pipeline.replies)
            pipeline.send(deltas()[0])
            assert await first == deltas()[0]
        async with client:
            reading = asyncio.create_task(read(client.stream("x")))
            await until(lambda: len(pipeline.replies) == 2)
            for part in deltas():
                pipeline.send_batch((pipeline.replies[1], part))
            pipeline.end(pipeline.replies[1])
            assert await reading == deltas()
            assert pipeline.resumes == []
        await left.aclose()
        await pipeline.bus.close()
