"""Readers that are gone, and readers that only seem to be."""

import asyncio
import itertools
from pathlib import Path

import pytest

from pagewire.services.detokenizer import service
from pagewire.services.detokenizer.frames import disconnect_monitor
from pagewire.services.detokenizer.frames.disconnect_monitor import MAX_UNDELIVERED, DisconnectMonitor
from pagewire.services.detokenizer.frames.frame_sender import FrameSender
from pagewire.services.detokenizer.state.completion import Completion
from pagewire.services.detokenizer.state.stream import Stream, Subscriber
from pagewire.shared.bus import Message, Subscription
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages.abort import AbortReason
from pagewire.shared.messages.open import Encoding
from pagewire.shared.messages.step import Finish
from tests.services.detokenizer.rig import Reader, Rig, ids, rig
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class Scene:
    """One stream, a reader of it on its own connection, and the looks that are taken at it."""

    def __init__(self, *, streaming: bool = True) -> None:
        broker = MemoryBroker()
        self.bus, self.client = MemoryBus(broker), MemoryBus(broker, inbox_prefix="_INBOX")
        self.monitor, self.sender = DisconnectMonitor(self.bus), FrameSender(self.bus)
        self.stream = Stream("r1", b"", [Completion([], [])], prompt_tokens=1)
        self.heard: list[Message] = []
        self.subscriber = Subscriber(self.stream, self.client.new_inbox(), Encoding.JSON, streaming=streaming)
        self.stream.subscribers.append(self.subscriber)

    async def arrive(self) -> Subscription:
        return await self.client.subscribe(self.subscriber.reply, self.heard.append)

    async def token(self) -> None:
        """One more of the stream, sent; returns when the broker's answer would have come."""
        completion = self.stream.completions[0]
        completion.tokens.append(7)
        completion.texts.append("t")
        self.sender.enqueue(self.stream)
        self.sender.drain()
        await self.settle()

    async def settle(self) -> None:
        for bus in (self.bus, self.client):
            await bus.flush()

    async def checks(self, count: int) -> int:
        """Takes looks with a token after each; how many of them found the reader gone."""
        gone = 0
        for _ in range(count):
            gone += self.subscriber in self.monitor.check([self.subscriber])
            await self.token()
        return gone


async def test_an_absent_reader_counts_as_gone_after_some_undelivered_frames() -> None:
    scene = Scene()
    await scene.monitor.listen()
    assert await scene.checks(MAX_UNDELIVERED) == 0
    assert scene.monitor.check([scene.subscriber]) == [scene.subscriber]


async def test_a_reader_that_listens_is_never_gone_and_sees_no_other_frames() -> None:
    scene = Scene()
    await scene.monitor.listen()
    await scene.arrive()
    assert await scene.checks(3 * MAX_UNDELIVERED) == 0
    await scene.token()
    assert len(scene.heard) == 3 * MAX_UNDELIVERED + 1
    assert scene.heard[0].reply
    assert not scene.heard[-1].reply  # one frame per look carries the question


async def test_a_reader_that_comes_back_in_time_is_there_again() -> None:
    """It is forgotten that it was away: it may be away as long once more."""

    scene = Scene()
    await scene.monitor.listen()
    for _ in range(3):
        assert await scene.checks(MAX_UNDELIVERED - 1) == 0
        back = await scene.arrive()
        assert await scene.checks(1) == 0
        await back.unsubscribe()
    assert await scene.checks(MAX_UNDELIVERED) == 0
    assert await scene.checks(1) == 1


async def test_a_stream_without_new_tokens_loses_no_reader() -> None:
    scene = Scene()
    await scene.monitor.listen()
    assert await scene.checks(MAX_UNDELIVERED - 1) == 0
    for _ in range(5 * MAX_UNDELIVERED):
        assert scene.monitor.check([scene.subscriber]) == []
    await scene.token()
    assert scene.monitor.check([scene.subscriber]) == [scene.subscriber]


async def test_a_reader_without_a_stream_is_not_asked() -> None:
    scene = Scene(streaming=False)
    await scene.monitor.listen()
    assert await scene.checks(2 * MAX_UNDELIVERED) == 0
    assert not scene.subscriber.probe


async def test_an_answer_of_the_reader_itself_does_not_count() -> None:
    scene = Scene()
    await scene.monitor.listen()

    def answer(message: Message) -> None:
        if message.reply:
            scene.client.publish(message.reply, b"here")

    await scene.client.subscribe(scene.subscriber.reply, answer)
    assert await scene.checks(3 * MAX_UNDELIVERED) == 0


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "KEEP_ALIVE_INTERVAL", 0.005)
    monkeypatch.setattr(disconnect_monitor, "MAX_UNDELIVERED", 3)


async def generate(world: Rig) -> None:
    """Tokens without an end."""
    (token,) = ids(" so")
    for position in itertools.count():
        world.step((100, position, token, Finish.NONE))
        await asyncio.sleep(0.002)


async def another_client(world: Rig) -> tuple[MemoryBus, Reader]:
    """On a connection of its own, so that it stays when the first one goes."""
    client = MemoryBus(world.broker, inbox_prefix="_INBOX")
    reader = Reader(client, Encoding.JSON)
    await client.subscribe(reader.inbox, reader.receive)
    return client, reader


@pytest.mark.usefixtures("hasty")
class TestTheService:
    async def test_the_scheduler_drops_sequences_without_a_reader(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open()
            await world.attach()
            generating = asyncio.create_task(generate(world))
            await until(lambda: reader.deltas)
            await world.client.close()
            await until(lambda: world.aborted)
            generating.cancel()
            assert world.aborted == [([100], AbortReason.CANCELLED)]
            await until(lambda: world.load["streams"] == 0)
            await until(lambda: world.ended_items)

    async def test_a_request_that_still_waits_is_cancelled_too(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open()
            await until(lambda: reader.queued)
            await world.client.close()
            await until(lambda: world.load["streams"] == 0)

    async def test_another_reader_keeps_the_stream(self, folder: Path) -> None:
        async with rig(folder) as world:
            first = await world.open()
            other, second = await another_client(world)
            await world.open_for(second)
            await until(lambda: first.queued and second.queued)
            await world.client.close()
            heard = second.queued
            await until(lambda: second.queued > heard + 20)
            assert world.load["streams"] == 1
            assert not world.aborted
            await other.close()
            await until(lambda: world.load["streams"] == 0)

    async def test_a_client_that_waits_for_its_result_keeps_the_stream(self, folder: Path) -> None:
        async with rig(folder) as world:
            gone = await world.open()
            _, waiting = await another_client(world)
            await world.open_for(waiting, stream=False)
            await until(lambda: gone.queued)
            await world.client.close()
            await world.open_for(gone, request_id="r2")
            await until(lambda: world.load["streams"] == 1)  # the same reader's other stream was asked later
            await world.attach()
            world.generate(ids("Hello"), Finish.LENGTH)
            assert (await waiting.result()).choices[0].text == "Hello"
