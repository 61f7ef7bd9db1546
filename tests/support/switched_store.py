"""An in-memory broker whose store refuses to store, or does not answer, as long as a test says so."""

import asyncio

from typing_extensions import override

from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.bus.memory_store import MemoryStore
from pagewire.shared.bus.protocol import Headers
from pagewire.shared.errors import BusError


class SwitchedStore(MemoryStore):
    """A store on a disk that can be full.

    Attributes:
        refusal: the error that writes raise; None: they succeed.
        silent: whether writes are never answered, as those of a JetStream whose disk has failed.
        attempts: writes so far.
    """

    def __init__(self) -> None:
        super().__init__(max_payload=1 << 20, ack_wait=2, done_age=120)
        self.refusal: BusError | None = None
        self.silent = False
        self.attempts = 0

    @override
    async def put_work(self, queue: str, data: bytes, *, headers: Headers | None = None) -> int:
        await self._write()
        return await super().put_work(queue, data, headers=headers)

    @override
    async def check(self) -> None:
        await self._write()

    @override
    async def put_done(self, request_id: str, data: bytes) -> None:
        await self._write()
        await super().put_done(request_id, data)

    async def _write(self) -> None:
        self.attempts += 1
        if self.refusal is not None:
            raise self.refusal
        if self.silent:
            await asyncio.get_running_loop().create_future()


def switched_broker() -> tuple[MemoryBroker, SwitchedStore]:
    """Returns a broker and its store."""
    broker = MemoryBroker()
    broker.store = store = SwitchedStore()
    return broker, store


def switched_bus() -> tuple[MemoryBus, SwitchedStore]:
    """Returns a connection to a new broker, and the broker's store."""
    broker, store = switched_broker()
    return MemoryBus(broker), store
