"""The adapters that a tokenizer knows, as the store of a real broker has them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest

from pagewire.embedded.broker import Broker
from pagewire.services.tokenizer.adapters import ServedAdapters
from pagewire.shared.adapters.adapter_store import AdapterStore
from pagewire.shared.bus import Headers, Message
from pagewire.shared.messages.adapters import AdapterRecord
from tests.support.broker import connect_role
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio


async def test_a_server_of_a_cluster_that_is_behind_reverts_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Broker(port=0, max_store=256 << 20) as broker:
        executor, bus = await connect_role(broker, "executor"), await connect_role(broker, "tokenizer")
        store, adapters = AdapterStore(executor, "m"), ServedAdapters(possible=True)
        await store.prepare(64 << 20, 1)
        await store.set_name(AdapterRecord("a", "old"), 0)
        reconnected: list[Callable[[], None]] = []
        monkeypatch.setattr(bus, "on_reconnect", reconnected.append)
        kept: list[Message] = []
        readings = 0
        request_many = bus.request_many

        async def behind(
            subject: str, data: bytes, *, stall: float, headers: Headers | None = None
        ) -> AsyncIterator[Message]:
            nonlocal readings
            readings += 1
            if not kept:
                kept.extend([message async for message in request_many(subject, data, stall=stall, headers=headers)])
            for message in kept:
                yield message

        monkeypatch.setattr(bus, "request_many", behind)

        def has_read(count: int) -> bool:
            return readings >= count

        digests = set[str]()

        def note() -> None:
            adapter = adapters.find("a")
            digests.add("" if adapter is None else adapter.digest)

        following = asyncio.create_task(adapters.follow(bus, "m", note))
        try:
            await until(lambda: digests == {"old"})
            digests.clear()
            await store.set_name(AdapterRecord("a", "new"), (await store.record("a"))[1])
            await until(lambda: digests == {"new"})
            for count in (readings + 1, readings + 2):  # the second begins when the records of the first are applied
                reconnected[0]()
                await until(partial(has_read, count))
            assert digests == {"new"}
        finally:
            following.cancel()
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(following, return_exceptions=True)
            await bus.close()
            await executor.close()
