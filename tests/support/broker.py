"""A real NATS server for tests, on a thread of its own, so that each test may run its own event loop."""

import asyncio
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from pagewire.embedded.broker import Broker, find_server
from pagewire.embedded.cluster import Cluster
from pagewire.shared import subjects
from pagewire.shared.bus import nats
from pagewire.shared.bus.nats import NatsBus
from pagewire.shared.errors import BusUnavailable
from pagewire.shared.security.api_keys import ApiKeys
from pagewire.shared.security.permissions import STORING
from pagewire.shared.settings.config import MAX_STORE, Settings


@contextmanager
def running_broker(api_key: str = "", api_keys: ApiKeys | None = None) -> Iterator[Broker]:
    """A server on a free port, stopped and cleaned up at the end. On one loop, use `Broker` itself instead."""
    with _running(Broker(port=0, api_key=api_key, api_keys=api_keys)) as broker:
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


@contextmanager
def plain_server(arguments: list[str], environment: dict[str, str]) -> Iterator[str]:
    """A `nats-server` started by hand; gives its URL."""
    with subprocess.Popen([find_server(), *arguments], env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            ports = (re.search(r"Listening for client connections on .*:(\d+)$", line) for line in process.stderr)
            yield f"nats://127.0.0.1:{next(port for port in ports if port)[1]}"
        finally:
            process.terminate()


async def connect_service(server: Broker | Cluster, name: str = "test", max_store: int = MAX_STORE) -> NatsBus:
    """A connection with all rights, which has created the streams. A cluster keeps copies of them on every server."""
    return await _connect(server, name, server.user, server.password, SERVICE_INBOX, max_store, create_streams=True)


async def connect_role(server: Broker | Cluster, role: str) -> NatsBus:
    """A connection with the rights of a service, which has created the streams if the service does so."""
    password, inboxes = server.passwords[role], subjects.service_inbox(role)
    return await _connect(server, role, role, password, inboxes, MAX_STORE, create_streams=role in STORING)


async def _connect(
    server: Broker | Cluster,
    name: str,
    user: str,
    password: str,
    inbox_prefix: str,
    max_store: int,
    *,
    create_streams: bool,
) -> NatsBus:
    replicas = len(server.brokers) if isinstance(server, Cluster) else 1
    while True:
        try:
            return await nats.connect(
                server.url,
                name=name,
                user=user,
                password=password,
                inbox_prefix=inbox_prefix,
                max_store=max_store,
                create_streams=create_streams,
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
