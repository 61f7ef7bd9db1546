"""Both buses behind one door: `run` gives a scenario a way to connect, and ends every connection behind it."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import pytest
import uvloop

from pagewire.embedded.broker import Broker
from pagewire.shared.bus import Bus
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.bus.protocol import ACK_WAIT
from tests.support.broker import connect_service, running_broker


@dataclass
class World:
    """One broker, of either kind, for one scenario."""

    open: Callable[[], Awaitable[Bus]]
    ack_wait: float
    opened: list[Bus] = field(default_factory=list)

    async def connect(self) -> Bus:
        """Another connection."""
        self.opened.append(await self.open())
        return self.opened[-1]


Scenario = Callable[[World], Awaitable[None]]
Run = Callable[[Scenario], None]


def in_memory() -> World:
    broker = MemoryBroker(ack_wait=0.3)

    async def open_bus() -> Bus:
        return MemoryBus(broker)

    return World(open_bus, ack_wait=0.3)


def over_nats(broker: Broker) -> World:
    return World(lambda: connect_service(broker), ack_wait=ACK_WAIT)


@pytest.fixture(scope="module")
def server() -> Iterator[Broker]:
    with running_broker() as broker:
        yield broker


@pytest.fixture(params=["memory", "nats", "nats-on-uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Services run on uvloop, tests and clients on any loop."""
    run_loop = uvloop.run if request.param == "nats-on-uvloop" else asyncio.run

    def run_scenario(scenario: Scenario) -> None:
        world = in_memory() if request.param == "memory" else over_nats(request.getfixturevalue("server"))

        async def main() -> None:
            try:
                await scenario(world)
            finally:
                for bus in world.opened:
                    await bus.close()

        run_loop(main())

    return run_scenario
