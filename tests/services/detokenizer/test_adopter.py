"""Streams of detokenizers that are gone, frozen or drained go on at another one, and only there."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typing_extensions import override

from pagewire.services.detokenizer.fence import Frozen
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.bus.memory_store import MemoryStore
from pagewire.shared.messages import encode, pack
from pagewire.shared.messages.adopted import Adopted
from pagewire.shared.messages.attach import AttachState
from pagewire.shared.messages.heartbeat import AWAITS_SUCCESSOR, Heartbeat
from pagewire.shared.messages.open import Encoding, OpenState, OpenStream, StoredWork
from pagewire.shared.messages.step import Finish
from pagewire.shared.messages.work import Sampling, WorkItem
from pagewire.shared.process.context import Drain
from pagewire.shared.rendezvous import rank
from tests.services.detokenizer.rig import HELLO, KEY, REQUEST, Reader, Rig, finish_hello, rig
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


def opening(reader: Reader, **values: Any) -> OpenStream:
    return msgspec.structs.replace(REQUEST, reply=reader.inbox, deadline=time.time() + 60, **values)


def queue(folder: Path) -> str:
    return subjects.work_queue(subjects.model_token(folder.name), 0, subjects.ANY)


async def store(broker: MemoryBroker, folder: Path, stream: OpenStream, detokenizer: str) -> None:
    """Puts the work of a stream into its queue."""
    item = WorkItem(
        stream.request_id, detokenizer, (pack([1]),), 1, Sampling(8), 0, stream.deadline, opening=encode(stream)
    )
    await broker.store.put_work(queue(folder), encode(item))


def say(world: Rig, instance: str, *, ready: bool = True, draining: bool = False) -> None:
    beat = Heartbeat("detokenizer", instance, ready, 0, 0, 0, {}, draining=draining)
    world.bus.publish(f"{subjects.HEARTBEAT}.detokenizer.{instance}", encode(beat))


def end(world: Rig, instance: str) -> None:
    world.bus.publish(f"{subjects.HEARTBEAT}.detokenizer.{instance}", b"")


class TestRunningRequests:
    """Their scheduler attaches them to the successor, with what opens the stream."""

    async def test_the_stream_goes_on_where_the_scheduler_knew_it(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.reader()
            answer = await world.attach((HELLO[:3],), step=2, opening=encode(opening(reader)))
            assert answer.state == AttachState.OPEN
            world.step((100, 3, HELLO[3], Finish.LENGTH), step=3)
            await reader.end()
            assert [d.token_ids[0] for d in reader.deltas] == HELLO[:4]
            assert [d.start for d in reader.deltas] == [0, 1, 2, 3]

    async def test_frames_that_the_predecessor_has_sent_are_not_sent_again(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.reader()
            await world.attach((HELLO[:3],), step=2, opening=encode(opening(reader)), sent=pack([2]))
            world.step((100, 3, HELLO[3], Finish.LENGTH), step=3)
            await reader.end()
            assert [d.start for d in reader.deltas] == [2, 3]
            again = await world.resume(reader.accepted.resume, 0)
            await again.end()
            assert [d.start for d in again.deltas] == [0, 1, 2, 3]

    async def test_steps_that_were_read_before_the_adoption_are_not_lost(self, folder: Path) -> None:
        async with rig(folder) as world:
            world.generate(HELLO[:5])
            await until(lambda: world.service.heartbeat().reads == {1: 4})
            reader = await world.reader()
            await world.attach((HELLO[:2],), step=1, opening=encode(opening(reader)))
            await until(lambda: len(reader.deltas) == 5)
            world.generate(HELLO[5:], Finish.LENGTH, start=5)
            await reader.end()
            assert [d.token_ids[0] for d in reader.deltas] == HELLO
            assert not world.replays

    async def test_steps_before_the_adopters_start_are_requested_once(self, folder: Path) -> None:
        async with rig(folder) as world:
            for position in range(4):
                token = HELLO[position]
                world.step((100, position, token, Finish.NONE), (200, position, token, Finish.NONE), lost=True)
            world.step((100, 4, HELLO[4], Finish.NONE), (200, 4, HELLO[4], Finish.NONE))
            await until(lambda: world.service.heartbeat().reads == {1: 4})
            readers = [await world.reader() for _ in range(2)]
            await asyncio.gather(
                world.attach((HELLO[:1],), step=0, opening=encode(opening(readers[0]))),
                world.attach(
                    (HELLO[:2],),
                    step=1,
                    opening=encode(opening(readers[1], request_id="r2")),
                    request_id="r2",
                    first_sequence=200,
                ),
            )
            await until(lambda: all(len(reader.deltas) == 5 for reader in readers))
            assert len(world.replays) == 1

    async def test_an_end_before_the_adopters_start_is_found(self, folder: Path) -> None:
        async with rig(folder) as world:
            for position in range(4):
                last = Finish.LENGTH if position == 3 else Finish.NONE
                world.step((100, position, HELLO[position], last), lost=True)
            reader = await world.reader()
            await world.attach((HELLO[:1],), step=0, opening=encode(opening(reader)))
            assert (await reader.end()).usage.completion_tokens == 4

    async def test_steps_that_the_executor_has_no_longer_are_asked_of_the_scheduler(self, folder: Path) -> None:
        async with rig(folder) as world:
            world.step((100, 6, HELLO[6], Finish.NONE), step=6)
            await until(lambda: world.service.heartbeat().reads == {1: 6})
            reader = await world.reader()
            await world.attach((HELLO[:1],), step=0, opening=encode(opening(reader)))
            await until(lambda: world.aborted)
            await world.attach((HELLO[:7],), step=6)
            await until(lambda: len(reader.deltas) == 7)

    async def test_an_ended_request_is_answered_from_its_record(self, folder: Path) -> None:
        broker = MemoryBroker()
        async with rig(folder, broker=broker) as world:
            first = await world.open()
            await finish_hello(world)
            await first.end()
        async with rig(folder, broker=broker, instance="d2") as world:
            reader = await world.reader()
            answer = await world.attach(opening=encode(opening(reader)))
            assert answer.state == AttachState.ENDED
            await reader.end()
            assert reader.bodies[1:] == first.bodies[1:]

    async def test_an_adopted_request_keeps_its_deadline(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.reader()
            late = msgspec.structs.replace(opening(reader), deadline=time.time() + 0.1)
            await world.attach(opening=encode(late))
            assert (await reader.error()).code == 408

    async def test_another_request_of_the_same_id_keeps_its_stream(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open(digest=b"another")
            answer = await world.attach((HELLO,), opening=encode(opening(reader)))
            assert answer.state == AttachState.ENDED
            assert not reader.deltas


class TestQueuedRequests:
    """The successor finds their items in the queue."""

    async def test_the_first_detokenizer_in_rank_opens_the_streams_of_a_dead_one(self, folder: Path) -> None:
        broker = MemoryBroker()
        async with rig(folder, broker=broker) as one, rig(folder, broker=broker, instance="d2") as two:
            await until(lambda: one.has_peer and two.has_peer)
            say(one, "dead")
            readers = {}
            for number in range(8):
                reader = readers[f"r{number}"] = await one.reader()
                await store(one.broker, folder, opening(reader, request_id=f"r{number}"), "dead")
            await one.bus.flush()
            assert not any(reader.messages for reader in readers.values())
            end(one, "dead")
            await until(lambda: all(reader.messages for reader in readers.values()))
            for name, reader in readers.items():
                assert f".{rank(name, ['d1', 'd2'])[0]}." in reader.accepted.cancel
            assert one.load["streams"] + two.load["streams"] == 8
            await until(lambda: all(reader.queued for reader in readers.values()))

    async def test_a_starting_detokenizer_adopts_the_streams_of_a_dead_one(self, folder: Path) -> None:
        broker = MemoryBroker()
        client = MemoryBus(broker, inbox_prefix="_INBOX")
        reader = Reader(client, Encoding.JSON)
        await client.subscribe(reader.inbox, reader.receive)
        await store(broker, folder, opening(reader), "dead")
        async with rig(folder, broker=broker) as world:
            await until(lambda: reader.messages)
            again = await world.reader()
            assert await world.open_for(again) == OpenState.ATTACHED, "the work is in the queue"
            await finish_hello(world)
            await again.end()

    async def test_the_streams_of_a_detokenizer_that_dies_during_a_look_are_adopted(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broker = MemoryBroker()
        list_work = broker.store.list_work
        async with rig(folder, broker=broker) as world:
            reader = await world.reader()
            events = iter((say, end))

            async def listed(prefix: str, after: int = 0) -> Any:
                items = await list_work(prefix, after)
                if (items or after) and (event := next(events, None)):
                    event(world, "dead")
                    await world.bus.flush()
                return items

            monkeypatch.setattr(broker.store, "list_work", listed)
            await store(broker, folder, opening(reader), "dead")
            await until(lambda: reader.messages)

    async def test_work_that_is_stored_after_the_death_is_adopted_too(self, folder: Path) -> None:
        async with rig(folder) as world:
            say(world, "dead")
            end(world, "dead")
            reader = await world.reader()
            await store(world.broker, folder, opening(reader), "dead")
            await until(lambda: reader.messages)

    async def test_the_streams_of_a_live_detokenizer_stay_there(self, folder: Path) -> None:
        broker = MemoryBroker()
        async with rig(folder, broker=broker) as one, rig(folder, broker=broker, instance="d2") as two:
            reader = await two.open()
            await store(two.broker, folder, opening(reader), "d2")
            say(one, "dead")
            end(one, "dead")
            other = await one.reader()
            await store(one.broker, folder, opening(other, request_id="r2"), "dead")
            await until(lambda: other.messages)
            assert "d2" in reader.accepted.cancel
            assert sum(hasattr(frame, "cancel") for frame in reader.frames) == 1

    async def test_a_request_that_is_in_no_queue_ends_with_an_error(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its tokenizer died between the opening of the stream and the storing of the work."""
        monkeypatch.setattr("pagewire.services.detokenizer.adopter.UNSTORED_AFTER", 0.2)
        async with rig(folder) as world:
            queued = await world.open(request_id="r2", stored=False)
            await store(world.broker, folder, opening(queued, request_id="r2"), "d1")
            reader = await world.open(stored=False)
            error = await reader.error()
            assert (error.code, error.retryable) == (503, True)
            assert queued.frames[0] == queued.accepted
            assert queued.last is None

    @pytest.mark.parametrize("adopted", [False, True])
    async def test_a_request_that_vanishes_from_its_queue_ends_with_an_error(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, adopted: bool
    ) -> None:
        monkeypatch.setattr("pagewire.services.detokenizer.adopter.CHECK_INTERVAL", 0.1)
        async with rig(folder) as world:
            owner = "dead" if adopted else "d1"
            if adopted:
                say(world, owner)
            reader = await world.reader() if adopted else await world.open(request_id="r2")
            stays = await world.reader() if adopted else await world.open(request_id="r3")
            await store(world.broker, folder, opening(reader, request_id="r2"), owner)
            await store(world.broker, folder, opening(stays, request_id="r3"), owner)
            if adopted:
                end(world, owner)
                await until(lambda: reader.messages and stays.messages)
            else:
                await world.ask("stored", StoredWork("r2", 1))
                await world.ask("stored", StoredWork("r3", 2))
            (lost, _) = await world.broker.store.pull_work(queue(folder), 2, expires=5)
            await world.broker.store.end_work(lost.ack)  # as if somebody had purged it
            error = await reader.error()
            assert (error.code, error.retryable) == (503, True)
            assert stays.last is None

    async def test_a_request_whose_number_another_item_has_got_ends_after_a_reconnection(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The broker's disk has lost the last items, and it counts on from there."""
        monkeypatch.setattr("pagewire.services.detokenizer.adopter.CHECK_INTERVAL", 0.1)
        reconnected: list[Callable[[], None]] = []
        monkeypatch.setattr(MemoryBus, "on_reconnect", lambda _, callback: reconnected.append(callback))
        async with rig(folder) as world:
            reader = await world.open(request_id="r2")
            stays = await world.open(request_id="r3")
            await store(world.broker, folder, opening(stays, request_id="r3"), "d1")
            await world.ask("stored", StoredWork("r3", 1))
            await world.ask("stored", StoredWork("r2", 1))
            for callback in reconnected:
                callback()
            error = await reader.error()
            assert (error.code, error.retryable) == (503, True)
            assert stays.last is None

    async def test_a_running_request_without_a_work_item_ends_with_its_scheduler(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody can bring it to another scheduler."""
        monkeypatch.setattr("pagewire.services.detokenizer.adopter.CHECK_INTERVAL", 0.1)
        async with rig(folder) as world:
            reader = await world.open(request_id="r1")
            await store(world.broker, folder, opening(reader, request_id="r1"), "d1")
            await world.ask("stored", StoredWork("r1", 1))
            (purged,) = await world.broker.store.pull_work(queue(folder), 1, expires=5)
            await world.attach(ack=purged.ack)
            await world.broker.store.end_work(purged.ack)
            checks, missing = [0], MemoryStore.missing_work

            async def count(store: MemoryStore, numbers: Collection[int]) -> set[int]:
                checks[0] += 1
                return await missing(store, numbers)

            monkeypatch.setattr(MemoryStore, "missing_work", count)
            await until(lambda: checks[0] == 3)
            assert reader.last is None, "it runs"
            world.bus.publish(f"{subjects.HEARTBEAT}.scheduler.s1", b"")
            error = await reader.error()
            assert (error.code, error.retryable) == (503, True)
            assert checks[0] <= 5, "that the item is missing was known before"

    async def test_a_running_request_whose_item_was_stored_again_outlives_its_scheduler(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pagewire.services.detokenizer.adopter.CHECK_INTERVAL", 0.1)
        async with rig(folder) as world:
            reader = await world.open(request_id="r1")
            await store(world.broker, folder, opening(reader, request_id="r1"), "d1")
            await world.ask("stored", StoredWork("r1", 1))
            (purged,) = await world.broker.store.pull_work(queue(folder), 1, expires=5)
            await world.attach(ack=purged.ack)
            await world.broker.store.end_work(purged.ack)
            await store(world.broker, folder, opening(reader, request_id="r1"), "d1")
            world.bus.publish(f"{subjects.HEARTBEAT}.scheduler.s1", b"")
            await asyncio.sleep(0.5)  # several checks: that nothing happens is what is tested
            assert reader.last is None

    @pytest.mark.parametrize("skew", [-600, 600])
    async def test_the_deadline_of_an_adopted_request_survives_a_wrong_clock(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, skew: float
    ) -> None:
        right = time.time
        monkeypatch.setattr(MemoryStore, "now", lambda _: right())
        async with rig(folder) as world:
            monkeypatch.setattr(time, "time", lambda: right() + skew)
            say(world, "dead")
            late, adopted = await world.reader(), await world.reader()
            for reader, name, deadline in ((late, "r2", right() - 1), (adopted, "r3", right() + 60)):
                item = msgspec.structs.replace(opening(reader, request_id=name), deadline=deadline)
                await store(world.broker, folder, item, "dead")
            end(world, "dead")
            assert (await late.error()).code == 408
            await until(lambda: adopted.messages)
            assert adopted.last is None

    async def test_an_adopted_request_may_wait_in_its_queue_for_any_time(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pagewire.services.detokenizer.adopter.UNSTORED_AFTER", 0.2)
        async with rig(folder) as world:
            say(world, "dead")
            adopted = await world.reader()
            await store(world.broker, folder, opening(adopted, request_id="r2"), "dead")
            end(world, "dead")
            await until(lambda: adopted.messages)
            lost = await world.open(stored=False)
            await lost.error()
            assert adopted.last is None, "its request is in a queue that the look has passed"


class SlowRecords(MemoryStore):
    """A store that waits for a test before it answers whether a request has ended, and before it takes a record."""

    def __init__(self) -> None:
        super().__init__(max_payload=1 << 20, ack_wait=2, done_age=120)
        self.questions: list[asyncio.Future[bytes | None]] = []
        self.may_write = asyncio.Event()

    @override
    async def get_done(self, request_id: str) -> bytes | None:
        self.questions.append(asyncio.get_running_loop().create_future())
        return await self.questions[-1]

    @override
    async def put_done(self, request_id: str, data: bytes) -> None:
        await self.may_write.wait()
        await super().put_done(request_id, data)


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> SlowRecords:
    monkeypatch.setattr("pagewire.services.detokenizer.adopter.UNSTORED_AFTER", 0.0)
    monkeypatch.setattr("pagewire.services.detokenizer.adopter.CHECK_INTERVAL", 0.1)
    return SlowRecords()


@asynccontextmanager
async def asking(folder: Path, records: SlowRecords) -> AsyncIterator[tuple[Rig, Reader]]:
    """A detokenizer that has asked for the record of an open request, which seems to be in no queue."""
    broker = MemoryBroker()
    broker.store = records
    async with rig(folder, broker=broker) as world:
        reader = await world.open(stored=False, fresh=True)  # a new id: no record is read
        await until(lambda: records.questions)
        yield world, reader


class TestSlowRecords:
    """The store says late whether a request that seems to be in no queue has ended."""

    @pytest.mark.parametrize("record", [None, b"record"])
    @pytest.mark.parametrize("event", ["stored", "attached"])
    async def test_a_request_that_was_queued_goes_on(
        self, folder: Path, records: SlowRecords, record: bytes | None, event: str
    ) -> None:
        async with asking(folder, records) as (world, reader):
            await (world.attach() if event == "attached" else world.ask("stored", StoredWork("r1", 1)))
            records.questions[0].set_result(record)
            records.may_write.set()
            await finish_hello(world)
            await reader.end()

    @pytest.mark.parametrize("record", [None, b"record"])
    async def test_a_request_that_ended_ends_once(
        self, folder: Path, records: SlowRecords, record: bytes | None
    ) -> None:
        async with asking(folder, records) as (world, reader):
            await world.abort("r1", "deadline_exceeded", "too late")
            records.questions[0].set_result(record)
            await world.bus.flush()
            records.may_write.set()
            assert (await reader.error()).code == 408

    async def test_a_request_that_another_detokenizer_owns_is_left_to_it(
        self, folder: Path, records: SlowRecords
    ) -> None:
        async with asking(folder, records) as (world, reader):
            owned = Adopted("other", ("r1",), pack([1, 1, 1]))
            world.bus.publish(f"{subjects.ADOPTED}.other", encode(owned))
            await until(lambda: world.load["streams"] == 0)
            records.questions[0].set_result(None)
            records.may_write.set()
            other = await world.open(request_id="r2", fresh=True)
            await until(lambda: other.messages)
            assert not reader.messages


class TestRequestsThatStartAgain:
    """They ended here with 503, and another detokenizer, which is gone by now, took them when they came again."""

    async def test_the_scheduler_of_the_second_attempt_has_it_adopted(self, folder: Path) -> None:
        async with rig(folder) as world:
            first = await world.open()
            await world.abort("r1", "unavailable", "the work was not stored")
            await first.error()
            again = await world.reader()
            answer = await world.attach((HELLO[:2],), step=1, move=1, opening=encode(opening(again)))
            assert answer.state == AttachState.OPEN
            world.generate(HELLO[2:], Finish.LENGTH, start=2)
            await again.end()
            assert [d.token_ids[0] for d in again.deltas] == HELLO

    async def test_the_second_attempt_is_adopted_from_its_queue(self, folder: Path) -> None:
        async with rig(folder) as world:
            first = await world.open()
            await world.abort("r1", "unavailable", "the work was not stored")
            await first.error()
            say(world, "dead")
            again = await world.reader()
            await store(world.broker, folder, opening(again), "dead")
            end(world, "dead")
            await until(lambda: again.messages)
            assert again.frames[0] == again.accepted
            await finish_hello(world)
            await again.end()

    async def test_another_owner_of_the_second_attempt_keeps_it(self, folder: Path) -> None:
        async with rig(folder) as world:
            first = await world.open()
            await world.abort("r1", "unavailable", "the work was not stored")
            await first.error()

            def object_to(_: Message) -> None:
                owned = Adopted("other", ("r1",), pack([1, 1, 1]))
                world.bus.publish(f"{subjects.ADOPTED}.other", encode(owned))

            await world.bus.subscribe(f"{subjects.ADOPTED}.d1", object_to)
            say(world, "dead")
            again, orphan = await world.reader(), await world.reader()
            await store(world.broker, folder, opening(again), "dead")
            await store(world.broker, folder, opening(orphan, request_id="r2"), "dead")
            end(world, "dead")
            await until(lambda: orphan.messages)
            assert not again.messages


class TestTwoOwners:
    """Two detokenizers have one stream, and one of them drops it without a word."""

    async def test_a_detokenizer_with_an_older_attachment_drops_its_stream(self, folder: Path) -> None:
        broker = MemoryBroker()
        async with rig(folder, broker=broker) as one, rig(folder, broker=broker, instance="d2") as two:
            first = await one.open()
            await one.attach()
            one.generate(HELLO[:2])
            await until(lambda: len(first.deltas) == 2)
            await two.attach((HELLO[:2],), step=1, move=1, opening=encode(opening(first)), sent=pack([2]))
            await until(lambda: one.load["streams"] == 0)
            one.generate(HELLO[2:], Finish.LENGTH, start=2)
            await first.end()
            assert [d.start for d in first.deltas] == list(range(len(HELLO)))
            await until(lambda: two.load["streams"] == 0)
            assert await broker.store.get_done("r1")

    async def test_a_detokenizer_with_the_newer_attachment_keeps_its_stream(self, folder: Path) -> None:
        broker = MemoryBroker()
        async with rig(folder, broker=broker) as one, rig(folder, broker=broker, instance="d2") as two:
            first = await one.open()
            await one.attach(generation=2)
            await two.attach(opening=encode(opening(first)))
            await until(lambda: two.load["streams"] == 0)
            assert one.load["streams"] == 1

    async def test_the_subjects_of_the_first_owner_reach_the_adopter(self, folder: Path) -> None:
        broker = MemoryBroker()
        async with rig(folder, broker=broker) as one, rig(folder, broker=broker, instance="d2") as two:
            reader = await one.open()
            await one.attach()
            await two.attach((HELLO[:2],), step=-1, move=1, opening=encode(opening(reader)))
            await until(lambda: one.load["streams"] == 0)
            resumed = await one.resume(f"{subjects.RESUME}.d1.r1.{KEY}", 1)
            await until(lambda: len(resumed.deltas) == 1)
            assert await one.cancel(f"{subjects.CANCEL}.d1.r1.{KEY}") == "cancelled"
            await resumed.end()

    async def test_a_request_that_is_sent_again_is_answered_beside_its_first_owner(self, folder: Path) -> None:
        """The first owner, which is being replaced, still has the stream that its scheduler has attached."""
        broker = MemoryBroker()
        async with rig(folder, broker=broker) as one, rig(folder, broker=broker, instance="d2") as two:
            await one.open()
            await one.attach()
            again = await two.open()
            resumed = await two.resume(again.accepted.resume, 0)
            one.generate(HELLO, Finish.LENGTH)
            await resumed.end()
            assert [delta.start for delta in resumed.deltas] == list(range(len(HELLO)))

    async def test_a_detokenizer_that_was_frozen_sends_nothing_and_ends(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with rig(folder) as world:
            world.may_fail = True
            reader = await world.open(timeout_ms=200)
            await world.attach()
            heard = len(reader.messages)
            monkeypatch.setattr("pagewire.services.detokenizer.fence.LIMIT", -1.0)
            world.generate(HELLO, Finish.LENGTH)
            assert world.serving is not None
            await asyncio.wait({world.serving})
            assert isinstance(world.serving.exception(), Frozen)
            assert not [frame for frame in reader.frames[heard:] if not hasattr(frame, "request_id")]
            assert reader.last is None
            assert await world.broker.store.get_done("r1") is None


class TestDrain:
    """It goes on until another one has its streams."""

    async def test_a_draining_detokenizer_hands_over_queued_and_running_streams(self, folder: Path) -> None:
        broker = MemoryBroker()
        async with rig(folder, broker=broker) as one:
            running, queued = await one.open(), await one.open(request_id="r2")
            await store(one.broker, folder, opening(queued, request_id="r2"), "d1")
            await one.attach()
            draining = asyncio.create_task(one.drain())
            await until(lambda: one.heartbeat.draining)
            assert not one.heartbeat.ready
            one.generate(HELLO[:2])
            await until(lambda: len(running.deltas) == 2)
            async with rig(folder, broker=broker, instance="d2") as two:
                await two.attach((HELLO[:2],), step=1, move=1, opening=encode(opening(running)), sent=pack([2]))
                await draining
                await until(lambda: two.load["streams"] == 2)
                assert running.last is None
                assert queued.last is None
                one.generate(HELLO[2:], Finish.LENGTH, start=2)
                await running.end()
                assert [d.start for d in running.deltas] == list(range(len(HELLO)))

    async def test_a_draining_detokenizer_takes_streams_until_its_successor_is_ready(self, folder: Path) -> None:
        broker = MemoryBroker()
        async with rig(folder, broker=broker, follows=Drain.SUCCESSOR) as one:
            draining = asyncio.create_task(one.drain())
            await until(lambda: one.load[AWAITS_SUCCESSOR])
            assert not one.heartbeat.ready
            reader = await one.open()
            await finish_hello(one)
            await reader.end()
            assert not draining.done()
            async with rig(folder, broker=broker, instance="d2"):
                await draining
                assert not one.load[AWAITS_SUCCESSOR]

    async def test_a_draining_detokenizer_finishes_streams_that_no_other_adopts(self, folder: Path) -> None:
        async with rig(folder) as world:
            reader = await world.open()
            await world.attach()
            draining = asyncio.create_task(world.drain())
            world.generate(HELLO, Finish.LENGTH)
            await reader.end()
            await draining
