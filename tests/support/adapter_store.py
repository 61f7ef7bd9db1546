"""The store of adapters on a real broker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pagewire.embedded.broker import Broker
from pagewire.shared.adapters.adapter_store import AdapterStore
from pagewire.shared.bus import Bus
from tests.support.broker import connect_role


@asynccontextmanager
async def store_of_executor() -> AsyncIterator[tuple[AdapterStore, Bus]]:
    """A store for the model `m`, over a connection with the rights of an executor."""
    async with Broker(port=0, max_store=256 << 20) as broker:
        bus = await connect_role(broker, "executor")
        try:
            store = AdapterStore(bus, "m")
            await store.prepare(64 << 20, 1)
            yield store, bus
        finally:
            await bus.close()
