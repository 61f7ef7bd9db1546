"""The store where the two buses differ: JetStream's streams, and the clock of the in-memory one."""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import msgspec
import pytest

from pagewire.embedded.broker import Broker
from pagewire.shared import subjects
from pagewire.shared.bus import Headers, Message, nats, nats_store, streams
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.bus.streams import DONE_STREAM, WORK_STREAM
from pagewire.shared.errors import BusUnavailable, ConfigurationError, ConnectionLost, StorageRefused
from tests.support.broker import connect_service
from tests.support.processes import freeze
from tests.support.waiting import until

MAX_STORE = 16 << 20

pytestmark = pytest.mark.anyio


class TestStreams:
    async def test_services_that_start_together_create_the_streams_once(self) -> None:
        async with Broker(port=0) as broker:
            buses = await asyncio.gather(*(connect_service(broker) for _ in range(8)))
            await asyncio.gather(*(bus.store.pull_work("m", 1, expires=0.05) for bus in buses))
            await buses[0].store.put_work("m", b"x")
            (item,) = await buses[1].store.pull_work("m", 1, expires=5)
            await buses[2].store.end_work(item.ack)
            for bus in buses:
                await bus.close()

    async def test_streams_are_on_disk_and_records_are_kept_for_two_minutes(self) -> None:
        async with Broker(port=0) as broker:
            bus = await connect_service(broker)
            configs = {}
            for name in (WORK_STREAM, DONE_STREAM):
                reply = await bus.request(f"$JS.API.STREAM.INFO.{name}", b"", timeout=30)
                configs[name] = msgspec.json.decode(reply.data)["config"]
            assert {config["storage"] for config in configs.values()} == {"file"}
            assert configs[WORK_STREAM]["retention"] == "workqueue"
            assert configs[DONE_STREAM]["max_age"] == 120 * 10**9
            await bus.close()

    async def test_a_tokenizer_waits_until_the_streams_are_there(self) -> None:
        async with Broker(port=0) as broker:
            tokenizer = await nats.connect(
                broker.url,
                name="test",
                user="tokenizer",
                password=broker.passwords["tokenizer"],
                inbox_prefix=subjects.service_inbox("tokenizer"),
            )
            with pytest.raises(StorageRefused, match="the streams are not there yet"):
                await tokenizer.store.check()
            await (await connect_service(broker)).close()
            await tokenizer.store.check()
            assert not tokenizer.denials
            await tokenizer.close()

    async def test_streams_with_other_settings_are_refused(self) -> None:
        async with Broker(port=0) as broker:
            bus = await connect_service(broker)
            await bus.request(f"$JS.API.STREAM.DELETE.{WORK_STREAM}", b"", timeout=30)
            other = {"name": WORK_STREAM, "subjects": [f"{subjects.WORK}.*"], "storage": "memory"}
            await bus.request(f"$JS.API.STREAM.CREATE.{WORK_STREAM}", msgspec.json.encode(other), timeout=30)
            with pytest.raises(ConfigurationError, match=WORK_STREAM):
                await connect_service(broker)
            await bus.close()

    async def test_a_full_queue_refuses_instead_of_growing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(streams.STREAMS[WORK_STREAM], "max_msgs", 2)
        async with Broker(port=0) as broker:
            bus = await connect_service(broker)
            for _ in range(2):
                await bus.store.put_work("m", b"x")
            with pytest.raises(BusUnavailable, match="maximum messages"):
                await bus.store.put_work("m", b"x")
            await bus.close()

    async def test_a_full_store_refuses_work_and_replaces_the_oldest_records(self) -> None:
        async with Broker(port=0, max_store=MAX_STORE) as broker:
            bus = await connect_service(broker, max_store=MAX_STORE)
            await bus.store.check()
            for _ in range(7):
                await bus.store.put_work("m", bytes(1 << 20))
            for _ in range(2):
                with pytest.raises(StorageRefused, match="maximum bytes"):
                    await bus.store.put_work("m", bytes(1 << 20))
            for number in range(20):
                await bus.store.put_done(f"r{number}", bytes(1 << 20))
            assert (await bus.store.get_done("r0"), await bus.store.get_done("r19")) == (None, bytes(1 << 20))
            await bus.store.next_term()

            for item in await bus.store.pull_work("m", 20, expires=5):
                await bus.store.end_work(item.ack)
            await bus.store.put_work("m", bytes(1 << 20))
            await bus.close()

    async def test_checks_of_the_store_leave_one_message_and_no_work(self) -> None:
        async with Broker(port=0) as broker:
            bus = await connect_service(broker)
            for _ in range(3):
                await bus.store.check()
            for name in (WORK_STREAM, DONE_STREAM):
                reply = await bus.request(f"$JS.API.STREAM.INFO.{name}", b"", timeout=30)
                assert msgspec.json.decode(reply.data)["state"]["messages"] == 1
            assert (await bus.store.queue_lengths("m")).items == {}
            await bus.close()

    async def test_a_server_without_room_for_the_streams_is_refused(self) -> None:
        async with Broker(port=0, max_store=MAX_STORE) as broker:
            with pytest.raises(ConfigurationError, match="--nats-max-store"):
                await connect_service(broker, max_store=4 * MAX_STORE)

    async def test_a_full_server_refuses_a_check(self) -> None:
        """Bytes that other streams of the server reserve count, too."""
        async with Broker(port=0, max_store=MAX_STORE) as broker:
            bus = await connect_service(broker, max_store=MAX_STORE // 2)
            other = {"name": "OTHER", "subjects": ["other"], "storage": "file"}
            await bus.request("$JS.API.STREAM.CREATE.OTHER", msgspec.json.encode(other), timeout=30)
            for _ in range(20):
                await bus.request("other", bytes(1 << 20), timeout=30)
            with pytest.raises(StorageRefused, match="insufficient resources"):
                await bus.store.check()
            with pytest.raises(StorageRefused, match="insufficient resources"):
                await bus.store.put_done("r", b"x")
            await bus.request("$JS.API.STREAM.DELETE.OTHER", b"", timeout=30)
            await bus.store.check()
            await bus.close()

    async def test_a_server_that_lost_its_disk_gets_new_streams(self, tmp_path: Path) -> None:
        async with Broker(port=0, store=tmp_path) as broker:
            bus = await connect_service(broker)
            await bus.store.put_work("m", b"lost")
            assert len(await bus.store.pull_work("m", 1, expires=5)) == 1
            os.kill(broker.pid, signal.SIGKILL)
            await broker.wait()
            shutil.rmtree(tmp_path / "jetstream")
            await broker.start()
            await bus.wait_connected()
            assert await bus.store.pull_work("m", 1, expires=0.2) == []
            await bus.store.put_work("m", b"new")
            (item,) = await bus.store.pull_work("m", 1, expires=5)
            assert item.data == b"new"
            await bus.store.end_work(item.ack)
            assert await bus.store.get_done("r") is None
            await bus.close()

    async def test_streams_of_another_release_are_updated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with Broker(port=0) as broker:
            with monkeypatch.context() as older:
                older.setitem(streams.STREAMS[WORK_STREAM], "max_msgs", 2)
                bus = await connect_service(broker)
                await bus.store.put_work("m", b"kept")
            await bus.store.prepare()
            for _ in range(3):
                await bus.store.put_work("m", b"x")
            assert len(await bus.store.pull_work("m", 10, expires=5)) == 4
            await bus.close()

    async def test_an_item_whose_answer_is_lost_is_stored_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with Broker(port=0) as broker:
            bus = await connect_service(broker)
            request, sent = bus.request, []

            async def lossy(subject: str, data: bytes, *, timeout: float, headers: Headers | None = None) -> Message:
                answer = await request(subject, data, timeout=timeout, headers=headers)
                sent.append(subject)
                if len(sent) < 3:
                    raise ConnectionLost("the broker died")
                return answer

            monkeypatch.setattr(bus, "request", lossy)
            await bus.store.put_work("m", b"x")
            assert len(sent) == 3
            monkeypatch.undo()
            assert len(await bus.store.pull_work("m", 10, expires=5)) == 1
            await bus.close()

    async def test_an_item_survives_the_death_of_the_broker_before_its_answer(self, tmp_path: Path) -> None:
        async with Broker(port=0, store=tmp_path) as broker:
            bus = await connect_service(broker)
            await freeze(broker.pid)  # the item reaches the socket, and nobody reads it
            putting = asyncio.create_task(bus.store.put_work("m", b"x"))
            await until(lambda: not bus.backlog())
            os.kill(broker.pid, signal.SIGKILL)
            await broker.wait()
            await until(lambda: not bus.connected)
            assert not putting.done()
            await broker.start()
            await putting
            assert [item.data for item in await bus.store.pull_work("m", 10, expires=5)] == [b"x"]
            await bus.close()

    async def test_a_broker_that_was_frozen_stores_afterwards(self) -> None:
        async with Broker(port=0) as broker:
            bus = await connect_service(broker)
            await freeze(broker.pid)
            storing = asyncio.gather(bus.store.put_work("m", b"x"), bus.store.check())
            asyncio.get_running_loop().call_later(1.3 * nats_store.TIMEOUT, os.kill, broker.pid, signal.SIGCONT)
            await storing
            assert [item.data for item in await bus.store.pull_work("m", 10, expires=5)] == [b"x"]
            await bus.close()

    async def test_a_broker_that_stays_frozen_says_nothing_about_its_store(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(nats_store, "TIMEOUT", 0.1)
        monkeypatch.setattr(nats_store, "PUT_TIMEOUT", 0.5)
        async with Broker(port=0) as broker:
            bus = await connect_service(broker)
            await freeze(broker.pid)
            with pytest.raises(ConnectionLost):
                await bus.store.check()
            os.kill(broker.pid, signal.SIGCONT)
            await bus.close()

    async def test_without_a_connection_storing_fails_in_bounded_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nats_store, "PUT_TIMEOUT", 0.1)
        async with Broker(port=0) as broker:
            bus = await connect_service(broker)
            os.kill(broker.pid, signal.SIGKILL)
            await until(lambda: not bus.connected)
            for putting in (bus.store.put_work("m", b"x"), bus.store.put_done("r", b"x")):
                with pytest.raises(ConnectionLost):
                    await putting
            await bus.close()

    async def test_a_waiting_pull_ends_when_the_bus_closes(self) -> None:
        async with Broker(port=0) as broker:
            bus = await connect_service(broker)
            pulling = asyncio.create_task(bus.store.pull_work("m", 1, expires=60))
            await bus.flush()
            await bus.close()
            with pytest.raises(BusUnavailable):
                await pulling


class TestMemory:
    async def test_records_of_ended_requests_expire(self) -> None:
        store = MemoryBus(MemoryBroker(done_age=0.05)).store
        await store.put_done("old", b"1")
        assert await store.get_done("old") == b"1"
        await asyncio.sleep(0.06)  # its age is what is tested
        assert await store.get_done("old") is None

    async def test_an_item_that_waits_again_can_be_ended(self) -> None:
        """A detokenizer may end it between its redelivery time and the next pull."""
        store = MemoryBus(MemoryBroker()).store
        await store.put_work("m", b"x")
        (item,) = await store.pull_work("m", 1, expires=1)
        await store.return_work(item.ack)
        await store.renew_work(item.ack)
        await store.end_work(item.ack)
        assert await store.pull_work("m", 1, expires=0.01) == []

    async def test_redelivered_items_come_first(self) -> None:
        store = MemoryBus(MemoryBroker()).store
        for number in range(4):
            await store.put_work("m", b"%d" % number)
        first, second = await store.pull_work("m", 2, expires=1)
        await store.return_work(second.ack)
        await store.return_work(first.ack)
        items = await store.pull_work("m", 4, expires=1)
        assert [(item.data, item.deliveries) for item in items] == [(b"0", 2), (b"1", 2), (b"2", 1), (b"3", 1)]
