"""A real server on which somebody with all rights deletes, changes and pauses what the store needs."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagewire.embedded.broker import Broker
from pagewire.shared.bus import Bus, nats
from pagewire.shared.bus.queue_consumers import LEADERLESS, QueueConsumers
from pagewire.shared.bus.store_replies import ConsumerInfo, Position
from pagewire.shared.bus.streams import DONE_STREAM, STREAMS, TERM_STREAM, WORK_STREAM
from pagewire.shared.errors import StorageRefused
from tests.support.broker import connect_service
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.anyio


class Scene:
    """A service and an operator at one server."""

    def __init__(self, service: Bus, operator: Bus) -> None:
        self.bus = service
        self.store = service.store
        self._operator = operator

    async def call(self, call: str, **body: Any) -> dict[str, Any]:
        """Calls JetStream's API as the operator."""
        answer = await self._operator.request(f"$JS.API.{call}", msgspec.json.encode(body), timeout=PATIENCE)
        decoded: dict[str, Any] = msgspec.json.decode(answer.data)
        assert "error" not in decoded, decoded["error"]
        return decoded

    async def change(self, stream: str, **settings: Any) -> None:
        config = (await self.call(f"STREAM.INFO.{stream}"))["config"]
        await self.call(f"STREAM.UPDATE.{stream}", **{**config, **settings})


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with Broker(port=0) as broker:
        service = await connect_service(broker)
        operator = await nats.connect(broker.url, name="operator", user=broker.user, password=broker.password)
        yield Scene(service, operator)
        await service.close()
        await operator.close()


async def test_deleted_streams_come_back_and_no_number_occurs_twice(scene: Scene) -> None:
    store = scene.store
    numbers = [await store.put_work("m.normal.any", b"x") for _ in range(3)]
    terms = [await store.next_term() for _ in range(3)]
    for stream in STREAMS:
        await scene.call(f"STREAM.DELETE.{stream}")
    assert await store.mend() == [f"the stream {WORK_STREAM} was deleted"], "all come back together"
    assert await store.mend() == []
    numbers += [await store.put_work("m.normal.any", b"x") for _ in range(3)]
    assert sorted(set(numbers)) == numbers
    assert await store.missing_work(numbers) == set(numbers[:3])
    terms += [await store.next_term() for _ in range(3)]
    assert sorted(set(terms)) == terms
    assert terms[-1] < 1 << 32, "it fits into a packed column"
    await store.put_done("r", b"record")
    assert await store.get_done("r") == b"record"


async def test_writers_and_readers_get_over_a_deletion(scene: Scene) -> None:
    """They miss the stream before anybody looks after it, all at once."""
    store = scene.store
    await store.put_work("m.normal.any", b"lost")
    assert len(await store.pull_work("m.normal.any", 1, expires=5)) == 1
    for stream in STREAMS:
        await scene.call(f"STREAM.DELETE.{stream}")
    await asyncio.gather(
        *(store.put_work("m.normal.any", b"%d" % number) for number in range(20)),
        *(store.put_done(f"r{number}", b"x") for number in range(20)),
        store.next_term(),
        store.pull_work("m.normal.any", 1, expires=0.1),
    )
    pulled = 0
    while pulled < 20:
        pulled += len(await store.pull_work("m.normal.any", 20, expires=1))
    assert await store.mend() == []


@pytest.mark.parametrize(
    ("stream", "settings"),
    [
        (WORK_STREAM, {"max_msgs": 1}),
        (WORK_STREAM, {"max_age": 1_000_000_000, "duplicate_window": 1_000_000_000}),
        (WORK_STREAM, {"max_msg_size": 10}),
        (WORK_STREAM, {"discard": "old", "max_msgs": 3}),
        (WORK_STREAM, {"subjects": ["somewhere.else"]}),
        (WORK_STREAM, {"no_ack": True}),
        (DONE_STREAM, {"max_msgs_per_subject": -1, "max_age": 0}),
        (TERM_STREAM, {"subjects": ["somewhere.else"]}),
    ],
)
async def test_changed_settings_are_taken_back(scene: Scene, stream: str, settings: dict[str, Any]) -> None:
    before = (await scene.call(f"STREAM.INFO.{stream}"))["config"]
    await scene.change(stream, **settings)
    (wrong,) = await scene.store.mend()
    assert stream in wrong
    assert all(name in wrong for name in settings)
    after = (await scene.call(f"STREAM.INFO.{stream}"))["config"]
    assert {**after, "first_seq": 0, "metadata": {}} == {**before, "first_seq": 0, "metadata": {}}
    await scene.store.check()
    assert await scene.store.mend() == []


async def test_a_setting_that_cannot_be_taken_back_is_named(scene: Scene) -> None:
    await scene.change(WORK_STREAM, sealed=True)
    with pytest.raises(StorageRefused, match=WORK_STREAM):
        await scene.store.mend()


async def test_a_queue_that_somebody_has_paused_delivers_again(scene: Scene) -> None:
    store, queue = scene.store, "m.normal.any"
    assert await store.pull_work(queue, 1, expires=0.1) == []
    await scene.call(f"CONSUMER.PAUSE.{WORK_STREAM}.m-normal-any", pause_until="2100-01-01T00:00:00Z")
    await store.put_work(queue, b"x")
    assert await store.pull_work(queue, 1, expires=0.2) == []
    assert await store.undelivered(queue) == 1
    await store.deliver_anew(queue)
    assert [item.data for item in await store.pull_work(queue, 1, expires=5)] == [b"x"]


async def test_an_item_that_nobody_renews_is_undelivered_while_its_queue_is_paused(scene: Scene) -> None:
    store, queue = scene.store, "m.normal.any"
    await store.put_work(queue, b"x")
    (item,) = await store.pull_work(queue, 1, expires=5)
    await scene.call(f"CONSUMER.PAUSE.{WORK_STREAM}.m-normal-any", pause_until="2100-01-01T00:00:00Z")
    assert await store.undelivered(queue) == 1
    await store.deliver_anew(queue)
    assert [again.number for again in await store.pull_work(queue, 1, expires=5)] == [item.number]


async def test_a_queue_whose_position_is_ahead_of_its_items_has_undelivered_ones(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some servers keep the positions of readers when their disk has lost what was read."""
    store, queue = scene.store, "m.normal.any"
    number = await store.put_work(queue, b"x")
    ahead = ConsumerInfo(delivered=Position(consumer_seq=100, stream_seq=number + 100), num_ack_pending=3)

    async def info(_: QueueConsumers, queue: str) -> ConsumerInfo:
        return ahead

    monkeypatch.setattr(QueueConsumers, "info", info)
    assert await store.undelivered(queue) == 1


async def test_a_queue_whose_consumer_has_no_leader_has_undelivered_items(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, queue = scene.store, "m.normal.any"
    await store.put_work(queue, b"x")

    async def info(_: QueueConsumers, queue: str) -> ConsumerInfo:
        return LEADERLESS

    monkeypatch.setattr(QueueConsumers, "info", info)
    assert await store.undelivered(queue) == 1


async def test_an_item_stored_after_a_loss_on_disk_is_delivered(tmp_path: Path) -> None:
    async with Broker(port=0, store=tmp_path) as broker:
        service = await connect_service(broker)
        store, queue = service.store, "m.normal.any"
        lost = [await store.put_work(queue, b"x") for _ in range(5)]
        for item in await store.pull_work(queue, 4, expires=5):
            await store.end_work(item.ack)
        os.kill(broker.pid, signal.SIGKILL)
        await broker.wait()
        (messages,) = tmp_path.rglob(f"{WORK_STREAM}/msgs")  # noqa: ASYNC240  # a few files
        shutil.rmtree(messages)
        await broker.start()
        await service.wait_connected()
        assert await store.missing_work(lost) == set(lost)
        assert await store.put_work(queue, b"y") < lost[-1], "numbers are given away again"
        assert [item.data for item in await store.pull_work(queue, 1, expires=5)] == [b"y"]
        await service.close()
