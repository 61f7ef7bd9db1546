"""The bus over a cluster: connections move to another server, and the store survives the loss of any one."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest

from pagewire.embedded.broker import Broker
from pagewire.embedded.cluster import Cluster
from pagewire.shared import subjects
from pagewire.shared.bus import Headers, Item, Message, nats, nats_store
from pagewire.shared.bus.nats import NatsBus
from pagewire.shared.bus.nats_client import CLUSTER_HANDSHAKE_TIMEOUT, CLUSTER_PING_INTERVAL
from pagewire.shared.bus.streams import WORK_STREAM
from pagewire.shared.errors import (
    BusError,
    BusUnavailable,
    ConfigurationError,
    ConnectionLost,
    NoResponders,
    RequestTimeout,
    StorageRefused,
)
from pagewire.shared.process.peers import SILENCE
from pagewire.shared.settings.config import Settings
from tests.support.broker import CLIENT_INBOX, connect_service
from tests.support.processes import freeze
from tests.support.waiting import PATIENCE, until

pytestmark = [pytest.mark.alone, pytest.mark.anyio]


class Scene:
    """Three servers and a connection to each, in the same order."""

    def __init__(self, cluster: Cluster, buses: list[NatsBus]) -> None:
        self.brokers = cluster.brokers
        self.buses = buses

    async def leader(self, stream: str) -> Broker:
        """The server that leads a stream."""
        info = await self.buses[0].request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=5)
        name = msgspec.json.decode(info.data)["cluster"]["leader"]
        return next(broker for broker in self.brokers if broker.name == name)

    def connected_elsewhere(self, broker: Broker) -> NatsBus:
        """A connection to another server."""
        return self.buses[self.brokers.index(broker) - 1]


@asynccontextmanager
async def cluster_of_three() -> AsyncIterator[Scene]:
    async with Cluster(Settings(nats_cluster=3, nats_port=0)) as cluster, connected(cluster) as scene:
        yield scene


@asynccontextmanager
async def connected(cluster: Cluster) -> AsyncIterator[Scene]:
    at: dict[str, NatsBus] = {}
    addresses = [broker.url.removeprefix("nats://") for broker in cluster.brokers]
    try:
        while len(at) < len(addresses):  # a connection chooses its server at random
            bus = await connect_service(cluster)
            if bus.address in at:
                await bus.close()
            else:
                at[bus.address] = bus
        yield Scene(cluster, [at[address] for address in addresses])
    finally:
        for bus in at.values():
            await bus.close()


async def pull(bus: NatsBus) -> list[Item]:
    """Pulls work as a scheduler does; returns none while the cluster elects a leader."""
    with suppress(BusUnavailable):
        return await bus.store.pull_work("m", 100, expires=2)
    return []


async def kill_server(broker: Broker) -> None:
    """Kills a server and returns once it has ended."""
    os.kill(broker.pid, signal.SIGKILL)
    await broker.wait()


async def freeze_server(broker: Broker) -> None:
    """Freezes a server and returns once all its threads stand."""
    await freeze(broker.pid)


@pytest.mark.parametrize("lose", [pytest.param(kill_server, marks=pytest.mark.full), freeze_server])
async def test_everything_is_stored_once_while_the_leader_dies_or_freezes(
    lose: Callable[[Broker], Awaitable[None]],
) -> None:
    async with cluster_of_three() as scene:
        victim = await scene.leader(WORK_STREAM)
        bus, another = scene.connected_elsewhere(victim), scene.buses[scene.brokers.index(victim)]
        before = await bus.store.next_term()
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
            for i in range(20):
                tasks.create_task((bus if i % 2 else another).store.put_work("m", b"%d" % i))
            await asyncio.sleep(0)
            await lose(victim)  # what it stores after the signal could not be read before an election
            tasks.create_task(bus.store.put_done("r", b"done"))
            tasks.create_task(another.store.put_done("s", b"done"))
            tasks.create_task(another.store.check())
        assert await another.store.next_term() > before
        assert [await other.store.get_done("r") for other in scene.buses if other is not another] == [b"done"] * 2
        stored: list[bytes] = []
        async with asyncio.timeout(PATIENCE):
            while len(stored) < 20:
                for item in await pull(bus):
                    stored.append(item.data)
                    await bus.store.end_work(item.ack)
        assert sorted(stored) == sorted(b"%d" % i for i in range(20))
        assert await bus.store.pull_work("m", 100, expires=0.1) == []
        if lose is freeze_server:
            os.kill(victim.pid, signal.SIGCONT)


async def test_a_connection_moves_when_its_server_dies() -> None:
    async with cluster_of_three() as scene:
        bus, publisher = scene.buses[0], scene.buses[1]
        received: list[bytes] = []
        await bus.subscribe("a", lambda message: received.append(message.data))
        moved = asyncio.Event()
        bus.on_reconnect(moved.set)
        os.kill(scene.brokers[0].pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE):
            await moved.wait()
        assert bus.address != scene.brokers[0].url.removeprefix("nats://")
        async with asyncio.timeout(PATIENCE):
            while not received:
                publisher.publish("a", b"x")
                await asyncio.sleep(0.01)


async def test_a_frozen_server_is_left_before_its_services_count_as_gone() -> None:
    unanswered = 2  # pings
    assert CLUSTER_PING_INTERVAL * (unanswered + 1) + CLUSTER_HANDSHAKE_TIMEOUT < SILENCE
    async with cluster_of_three() as scene:
        moved = asyncio.Event()
        scene.buses[0].on_reconnect(moved.set)
        await freeze(scene.brokers[0].pid)
        async with asyncio.timeout(PATIENCE):
            await moved.wait()
        os.kill(scene.brokers[0].pid, signal.SIGCONT)


async def test_a_first_connection_passes_over_servers_that_do_not_answer() -> None:
    async with cluster_of_three() as scene:
        os.kill(scene.brokers[0].pid, signal.SIGKILL)
        await freeze(scene.brokers[1].pid)
        urls = ",".join(broker.url for broker in scene.brokers)
        for _ in range(4):
            bus = await nats.connect(urls, name="test", inbox_prefix=CLIENT_INBOX)
            assert bus.address == scene.brokers[2].url.removeprefix("nats://")
            await bus.close()
        os.kill(scene.brokers[1].pid, signal.SIGCONT)


async def test_a_subscription_precedes_later_messages_of_its_connection(cluster: Cluster) -> None:
    async with connected(cluster) as scene:
        one, two, _ = scene.buses
        received: list[bytes] = []
        await two.subscribe("say", lambda message: two.publish(message.reply, message.data))
        async with asyncio.timeout(PATIENCE):
            while not received:  # the servers do not know of it yet
                with suppress(NoResponders):
                    received.append((await one.request("say", b"", timeout=5)).data)
        for i in range(100):
            await one.subscribe(f"said.{i}", lambda message: received.append(message.data))
            one.publish("say", b"%d" % i, reply=f"said.{i}")
        await until(lambda: len(received) == 101)


@pytest.mark.parametrize("error", [ConnectionLost("x"), NoResponders("x"), RequestTimeout("x")])
async def test_an_item_whose_answer_is_lost_is_stored_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, error: BusError
) -> None:
    async with connected(cluster) as scene:
        bus = scene.buses[0]
        request, sent = bus.request, []

        async def lossy(subject: str, data: bytes, *, timeout: float, headers: Headers | None = None) -> Message:
            answer = await request(subject, data, timeout=timeout, headers=headers)
            if subject.startswith(subjects.WORK):
                sent.append(subject)
                if len(sent) < 3:
                    raise error
            return answer

        monkeypatch.setattr(bus, "request", lossy)
        queue = type(error).__name__
        await bus.store.put_work(queue, b"x")
        assert len(sent) == 3
        monkeypatch.undo()
        (item,) = await bus.store.pull_work(queue, 10, expires=5)
        await bus.store.end_work(item.ack)


async def test_the_store_refuses_work_without_a_majority_and_takes_it_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster_of_three() as scene:
        bus = scene.buses[2]
        await bus.store.put_work("m", b"kept")
        for broker in scene.brokers[:2]:
            await kill_server(broker)
        monkeypatch.setattr(nats_store, "ELECTION_TIMEOUT", 0.5)
        for refused in (bus.store.put_work("m", b"x"), bus.store.put_done("r", b"x"), bus.store.check()):
            with pytest.raises(StorageRefused, match="no leader"):
                await refused
        monkeypatch.undo()
        for broker in scene.brokers[:2]:
            await broker.start()
        await bus.store.check()
        items: list[Item] = []
        async with asyncio.timeout(PATIENCE):
            while not items:
                items = await pull(bus)
        assert items[0].data == b"kept"


async def connect_once(server: Broker | Cluster, replicas: int) -> NatsBus:
    """A connection that creates the streams, without another attempt."""
    user, password = server.user, server.password
    return await nats.connect(
        server.url, name="test", user=user, password=password, create_streams=True, replicas=replicas
    )


async def test_a_service_waits_for_as_many_servers_as_copies(cluster: Cluster) -> None:
    await (await connect_service(cluster)).close()
    with pytest.raises(BusUnavailable, match="--nats-replicas needs as many servers"):
        await connect_once(cluster, replicas=5)


@pytest.mark.full
async def test_a_service_starts_with_one_server_missing_and_waits_for_a_second() -> None:
    async with Cluster(Settings(nats_cluster=3, nats_port=0)) as cluster:
        await (await connect_service(cluster)).close()
        for broker in cluster.brokers[:2]:
            await kill_server(broker)
        with pytest.raises(BusUnavailable, match="do enough of its servers run"):
            await connect_once(cluster, replicas=3)
        await cluster.brokers[0].start()
        await (await connect_service(cluster)).close()


async def test_a_single_server_cannot_keep_several_copies() -> None:
    async with Broker(port=0) as broker:
        with pytest.raises(ConfigurationError, match="set --nats-replicas to 1"):
            await connect_once(broker, replicas=3)


async def test_servers_without_room_for_the_streams_are_refused() -> None:
    async with Cluster(Settings(nats_cluster=3, nats_port=0, nats_max_store=16 << 20)) as cluster:
        await (await connect_service(cluster, max_store=8 << 20)).close()
        with pytest.raises(ConfigurationError, match="--nats-max-store"):
            await connect_service(cluster, max_store=1 << 30)
