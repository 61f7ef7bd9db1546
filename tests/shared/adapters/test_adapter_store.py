"""The store of adapters on a real broker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pagewire.embedded.broker import Broker
from pagewire.shared.adapters import adapter_store
from pagewire.shared.adapters.adapter_store import AdapterStore
from pagewire.shared.adapters.files import AdapterFiles
from pagewire.shared.bus import Bus
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.messages.adapters import AdapterRecord
from tests.support.broker import connect_role

pytestmark = pytest.mark.anyio

FILES = AdapterFiles(b"{}", bytes(range(256)) * 8192)  # several parts
OTHER = AdapterFiles(b"{}", b"other")


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[AdapterStore, Bus]]:
    async with Broker(port=0, max_store=256 << 20) as broker:
        bus = await connect_role(broker, "executor")
        try:
            store = AdapterStore(bus, "m")
            await store.prepare(64 << 20, 1)
            await store.prepare(64 << 20, 1)
            yield store, bus
        finally:
            await bus.close()


async def test_content_is_found_by_its_hash_and_names_by_their_model() -> None:
    async with opened() as (store, bus):
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


async def test_content_without_a_name_is_deleted_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as (store, _):
        for files in (FILES, OTHER):
            await store.put(files)
        await store.set_name(AdapterRecord("a", OTHER.digest), 0)
        await store.retire(FILES.digest)
        assert await store.get(FILES.digest) == FILES
        monkeypatch.setattr(adapter_store, "KEPT_SECONDS", 0.0)
        await store.retire(OTHER.digest)
        assert await store.get(OTHER.digest) == OTHER
        with pytest.raises(ConfigurationError, match="does not have the adapter"):
            await store.get(FILES.digest)
        await store.put(FILES)
        assert await store.get(FILES.digest) == FILES


async def test_the_broker_must_have_room() -> None:
    async with Broker(port=0, max_store=32 << 20) as broker:
        bus = await connect_role(broker, "executor")
        try:
            with pytest.raises(ConfigurationError, match="lower adapter-store"):
                await AdapterStore(bus, "m").prepare(64 << 20, 1)
        finally:
            await bus.close()
