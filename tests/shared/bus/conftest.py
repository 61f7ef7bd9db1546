"""The fixture `world` runs a test on each kind of bus and closes its connections at the end."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import pytest

from pagewire.embedded.broker import Broker
from pagewire.embedded.cluster import Cluster
from pagewire.shared.bus import Bus
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.bus.protocol import ACK_WAIT
from tests.support.broker import connect_service, running_broker, running_cluster


@dataclass
class World:
    """The broker of one test, of either kind."""

    open: Callable[[], Awaitable[Bus]]
    ack_wait: float
    opened: list[Bus] = field(default_factory=list)

    async def connect(self) -> Bus:
        """Opens another connection."""
        self.opened.append(await self.open())
        return self.opened[-1]


def in_memory() -> World:
    broker = MemoryBroker(ack_wait=1.0)

    async def open_bus() -> Bus:
        return MemoryBus(broker)

    return World(open_bus, ack_wait=1.0)


def over_nats(broker: Broker | Cluster) -> World:
    return World(lambda: connect_service(broker), ack_wait=ACK_WAIT)


@pytest.fixture(scope="module")
def server() -> Iterator[Broker]:
    with running_broker() as broker:
        yield broker


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


KINDS = ["memory", "nats", "nats-on-uvloop"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Services run on uvloop, tests and clients on any loop. The store has one more kind, `cluster`."""
    return str(request.param)


@pytest.fixture
async def world(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    servers = "cluster" if kind == "cluster" else "server"
    world = in_memory() if kind == "memory" else over_nats(request.getfixturevalue(servers))
    yield world
    for bus in world.opened:
        await bus.close()
