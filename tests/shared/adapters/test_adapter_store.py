"""The store of adapters on a real broker."""

import msgspec
import pytest

from pagewire.embedded.broker import Broker
from pagewire.shared import subjects
from pagewire.shared.adapters import adapter_store
from pagewire.shared.adapters.adapter_store import AdapterStore, pattern_of, record_of
from pagewire.shared.adapters.files import AdapterFiles
from pagewire.shared.bus import Bus, Headers, Message
from pagewire.shared.bus.framing import STATUS
from pagewire.shared.bus.jetstream import API
from pagewire.shared.bus.store_replies import stream_info
from pagewire.shared.bus.streams import ADAPTER_STREAM
from pagewire.shared.errors import ConfigurationError, StorageRefused
from pagewire.shared.messages.adapters import AdapterRecord
from tests.support.adapter_store import store_of_executor
from tests.support.broker import connect_role
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio

FILES = AdapterFiles(b"{}", bytes(range(256)) * 8192)  # several parts
OTHER = AdapterFiles(b"{}", b"other")


async def contents(bus: Bus) -> set[str]:
    """The subjects of all parts that the stream has."""
    request = msgspec.json.encode({"subjects_filter": f"{subjects.ADAPTER_CONTENT}.>"})
    info = await bus.request(f"{API}.STREAM.INFO.{ADAPTER_STREAM}", request, timeout=PATIENCE)
    return set(stream_info.decode(info.data).state.subjects or ())


async def test_content_is_found_by_its_hash_and_names_by_their_model() -> None:
    async with store_of_executor() as (store, bus):
        await store.prepare(64 << 20, 1)  # as another service does
        for _ in range(2):
            await store.put(FILES)
        assert await store.get(FILES.digest) == FILES
        with pytest.raises(ConfigurationError, match="does not have the adapter"):
            await store.get(OTHER.digest)
        assert await store.record("a.b") == (None, 0)
        assert await store.records() == []
        records = [AdapterRecord(f"a.{i}", FILES.digest) for i in range(adapter_store.LIST_BATCH + 3)]
        for record in records:
            assert await store.set_name(record, 0)
        removed = AdapterRecord("a.0", "")
        _, revision = await store.record("a.0")
        assert await store.set_name(removed, revision)
        assert (await store.record("a.0"))[0] == removed
        assert sorted(await store.records(), key=str) == sorted([removed, *records[1:]], key=str)
        assert await AdapterStore(bus, "other").records() == []


async def test_whoever_follows_a_name_sees_the_change_last_that_the_store_has_taken() -> None:
    """A change that the store refuses is a message like any other."""
    async with Broker(port=0, max_store=256 << 20) as broker:
        bus, follower = await connect_role(broker, "executor"), await connect_role(broker, "tokenizer")
        try:
            store, received = AdapterStore(bus, "m"), list[AdapterRecord | None]()
            await store.prepare(64 << 20, 1)
            await follower.subscribe(pattern_of("m"), lambda message: received.append(record_of(message)))
            taken, refused = AdapterRecord("a", FILES.digest), AdapterRecord("a", OTHER.digest)
            assert await store.set_name(taken, 0)
            assert not await store.set_name(refused, 0)
            await until(lambda: received == [taken, refused, taken])
            assert (await store.record("a"))[0] == taken
        finally:
            await follower.close()
            await bus.close()


async def test_content_without_a_name_is_deleted_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with store_of_executor() as (store, _):
        for files in (FILES, OTHER):
            await store.put(files)
        await store.set_name(AdapterRecord("a", OTHER.digest), 0)
        await store.retire(FILES.digest)
        assert await store.get(FILES.digest) == FILES
        await store.retire(OTHER.digest)
        await store.sweep()
        assert await store.get(FILES.digest) == FILES
        monkeypatch.setattr(adapter_store, "KEPT_SECONDS", 0.0)
        await store.sweep()
        assert await store.get(OTHER.digest) == OTHER
        with pytest.raises(ConfigurationError, match="does not have the adapter"):
            await store.get(FILES.digest)
        await store.put(FILES)
        assert await store.get(FILES.digest) == FILES


async def test_content_that_nobody_has_marked_is_deleted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an executor has died while it stored an adapter."""
    async with store_of_executor() as (store, bus):
        part = f"{subjects.ADAPTER_CONTENT}.{FILES.digest}.0"
        await bus.request(part, b"the first part", timeout=PATIENCE)
        await store.sweep()
        assert await contents(bus) == {part}
        monkeypatch.setattr(adapter_store, "KEPT_SECONDS", 0.0)
        await store.sweep()
        assert await contents(bus) == set()


async def test_content_that_has_a_name_is_kept_once_more_after_it_has_lost_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mark that it had before its name says nothing any more."""
    async with store_of_executor() as (store, _):
        await store.put(FILES)
        await store.set_name(AdapterRecord("a", FILES.digest), 0)
        await store.sweep()
        _, revision = await store.record("a")
        await store.set_name(AdapterRecord("a", ""), revision)
        monkeypatch.setattr(adapter_store, "KEPT_SECONDS", 0.0)
        await store.sweep()
        assert await store.has(FILES.digest)
        await store.sweep()
        assert not await store.has(FILES.digest)


async def test_no_part_stays_of_content_for_which_there_is_no_room() -> None:
    async with Broker(port=0, max_store=32 << 20) as broker:
        bus = await connect_role(broker, "executor")
        try:
            store = AdapterStore(bus, "m")
            await store.prepare(len(FILES.weights) - 1, 1)
            with pytest.raises(StorageRefused):
                await store.put(FILES)
            assert await contents(bus) == set()
        finally:
            await bus.close()


async def test_content_that_cannot_be_deleted_now_is_deleted_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async with store_of_executor() as (store, bus):
        await store.put(FILES)
        monkeypatch.setattr(adapter_store, "KEPT_SECONDS", 0.0)
        request = bus.request

        async def refuse(subject: str, data: bytes, *, timeout: float, headers: Headers | None = None) -> Message:
            if ".PURGE." in subject:
                return Message(subject, b'{"error": {"description": "not now", "code": 503, "err_code": 10008}}')
            return await request(subject, data, timeout=timeout, headers=headers)

        with monkeypatch.context() as refusing:
            refusing.setattr(bus, "request", refuse)
            with pytest.raises(StorageRefused, match="not now"):
                await store.sweep()
        assert await store.has(FILES.digest)
        await store.sweep()
        assert not await store.has(FILES.digest)


async def test_reads_do_not_depend_on_a_server_that_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cluster any server may answer DIRECT.GET, also one that does not have the message yet."""
    async with store_of_executor() as (store, bus):
        await store.put(FILES)
        await store.set_name(AdapterRecord("a", FILES.digest), 0)
        request = bus.request

        async def behind(subject: str, data: bytes, *, timeout: float, headers: Headers | None = None) -> Message:
            if ".DIRECT.GET." in subject:
                return Message(subject, b"", headers={STATUS: "404"})
            return await request(subject, data, timeout=timeout, headers=headers)

        monkeypatch.setattr(bus, "request", behind)
        assert (await store.record("a"))[0] == AdapterRecord("a", FILES.digest)
        assert await store.has(FILES.digest)
        assert await store.get(FILES.digest) == FILES
        assert await store.record("b") == (None, 0)
        assert not await store.has(OTHER.digest)


async def test_the_broker_must_have_room() -> None:
    async with Broker(port=0, max_store=32 << 20) as broker:
        bus = await connect_role(broker, "executor")
        try:
            with pytest.raises(ConfigurationError, match="lower adapter-store"):
                await AdapterStore(bus, "m").prepare(64 << 20, 1)
        finally:
            await bus.close()
