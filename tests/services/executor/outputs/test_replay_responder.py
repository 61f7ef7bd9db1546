"""Readers that missed steps get them, to themselves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pagewire.services.executor.outputs.replay_buffer import ReplayBuffer
from pagewire.services.executor.outputs.replay_responder import ReplayResponder
from pagewire.shared.bus import Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages.plan import Replay
from tests.services.executor.fakes import PATIENCE


class Desk:
    """ReplayResponder over a memory bus, asked as the executor asks it."""

    def __init__(self) -> None:
        self.broker = MemoryBroker(max_payload=100)
        self.bus, self.reader = MemoryBus(self.broker), MemoryBus(self.broker)
        self.buffer = ReplayBuffer(steps=300)
        self.replays = ReplayResponder(self.bus, self.buffer)

    async def read(self, wanted: Replay) -> list[bytes]:
        def ask(message: Message) -> None:
            self.replays.ask(wanted, message.reply)

        subscription = await self.bus.subscribe("replay", ask)
        try:
            return [each.data async for each in self.reader.request_many("replay", b"", stall=PATIENCE)]
        finally:
            await subscription.unsubscribe()


@asynccontextmanager
async def open_desk() -> AsyncIterator[Desk]:
    desk = Desk()
    serving = asyncio.create_task(desk.replays.run())
    try:
        async with asyncio.timeout(PATIENCE):
            yield desk
    finally:
        serving.cancel()
        await asyncio.wait({serving})
        await desk.reader.close()
        await desk.bus.close()


@pytest.mark.anyio
async def test_a_reader_gets_the_buffered_outputs_of_its_range() -> None:
    async with open_desk() as desk:
        for step in range(500):
            desk.buffer.append(3, step, b"%d" % step)
        assert await desk.read(Replay(3, 250, 252)) == [b"250", b"251", b"252"]
        assert await desk.read(Replay(3, 0, 201)) == [b"200", b"201"]  # the buffer has lost those before
        assert await desk.read(Replay(3, 0, 10_000)) == [b"%d" % step for step in range(200, 500)]


@pytest.mark.anyio
async def test_steps_of_another_term_are_not_replayed() -> None:
    async with open_desk() as desk:
        desk.buffer.append(3, 0, b"0")
        assert await desk.read(Replay(2, 0, 5)) == []
        assert await desk.read(Replay(4, 0, 5)) == []


@pytest.mark.anyio
async def test_two_readers_are_answered_apart() -> None:
    async with open_desk() as desk:
        for step in range(200):
            desk.buffer.append(1, step, b"%d" % step)
        one, two = MemoryBus(desk.broker), MemoryBus(desk.broker)
        inboxes: dict[str, list[bytes]] = {one.new_inbox(): [], two.new_inbox(): []}
        done = asyncio.Semaphore(0)

        def collect(message: Message) -> None:
            if message.data:
                inboxes[message.subject].append(message.data)
            else:
                done.release()

        for bus, inbox in zip((one, two), inboxes, strict=True):
            await bus.subscribe(inbox, collect)
        first, second = inboxes
        desk.replays.ask(Replay(1, 0, 150), first)
        desk.replays.ask(Replay(1, 150, 151), second)
        await done.acquire()
        await done.acquire()
        assert inboxes == {first: [b"%d" % step for step in range(151)], second: [b"150", b"151"]}


@pytest.mark.anyio
async def test_a_failed_answer_does_not_end_the_responder() -> None:
    async with open_desk() as desk:
        desk.buffer.append(1, 0, b"too large" * desk.bus.max_payload)
        desk.buffer.append(1, 1, b"1")
        desk.replays.ask(Replay(1, 0, 0), "_SVC.nobody")
        assert await desk.read(Replay(1, 1, 1)) == [b"1"]


@pytest.mark.anyio
async def test_requests_beyond_the_bound_are_dropped() -> None:
    desk = Desk()
    for _ in range(200):
        desk.replays.ask(Replay(1, 0, 0), "_SVC.somebody")
    assert 0 < desk.replays.waiting < 200
