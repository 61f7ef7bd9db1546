"""A real NATS server for tests, on a thread of its own, so that each test may run its own event loop."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from pagewire.embedded.broker import Broker
from pagewire.embedded.cluster import Cluster
from pagewire.shared import subjects
from pagewire.shared.bus import nats
from pagewire.shared.bus.nats import NatsBus
from pagewire.shared.config import MAX_STORE, Settings
from pagewire.shared.errors import BusUnavailable


@contextmanager
def running_broker(api_key: str = "") -> Iterator[Broker]:
    """A server on a free port, stopped and cleaned up at the end. On one loop, use `Broker` itself instead."""
    with _running(Broker(port=0, api_key=api_key)) as broker:
        yield broker


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Three servers on free ports, stopped and cleaned up at the end."""
    with _running(Cluster(Settings(nats_cluster=3, nats_port=0))) as cluster:
        yield cluster


S = TypeVar("S", Broker, Cluster)


@contextmanager
def _running(server: S) -> Iterator[S]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="broker")
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(20)
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def connect_service(broker: Broker | Cluster, name: str = "test", max_store: int = MAX_STORE) -> NatsBus:
    """A connection with the rights of a service. A cluster keeps all that is stored on every server."""
    replicas = len(broker.brokers) if isinstance(broker, Cluster) else 1
    while True:
        try:
            return await nats.connect(
                broker.url,
                name=name,
                user=broker.user,
                password=broker.password,
                max_store=max_store,
                replicas=replicas,
            )
        except BusUnavailable:
            if replicas == 1:
                raise
            await asyncio.sleep(0.1)  # the servers have no leader yet


async def connect_client(broker: Broker, *, api_key: str = "") -> NatsBus:
    """A connection with the rights of a client, without credentials unless there is a key."""
    user = "client" if api_key else ""
    return await nats.connect(broker.url, name="client", user=user, password=api_key, inbox_prefix=CLIENT_INBOX)


CLIENT_INBOX = "_INBOX"
SERVICE_INBOX = subjects.SERVICE_INBOX
