"""Heartbeats on a bus in memory."""

import asyncio

import pytest

from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.process import heartbeater
from pagewire.shared.process.heartbeater import Heartbeater
from pagewire.shared.process.peers import Peers
from tests.support.waiting import PATIENCE, until


class Silent:
    """A service that does nothing."""

    def heartbeat(self) -> Heartbeat:
        return Heartbeat("executor", "e", ready=True, term=0, plan=0, step=0, load={})

    def metrics(self) -> tuple[()]:
        return ()

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def drain(self) -> None:
        pass


@pytest.mark.anyio
async def test_a_new_listener_gets_all_heartbeats_before_the_next_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeater, "INTERVAL", 2 * PATIENCE)
    broker = MemoryBroker()
    beating = asyncio.create_task(Heartbeater(MemoryBus(broker), "executor", "e").run(Silent()))
    heard, first = asyncio.Event(), Peers(MemoryBus(broker))
    await first.listen("executor")
    await until(lambda: first.find("e"))
    listener = Peers(MemoryBus(broker))
    async with asyncio.timeout(PATIENCE):
        await listener.listen("executor", heard.set)
        await heard.wait()
    assert listener.find("e") is not None
    beating.cancel()
    await asyncio.wait({beating})
