"""A real NATS server for tests, on a thread of its own, so that each test may run its own event loop."""

import asyncio
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pagewire.embedded.broker import Broker, find_server
from pagewire.shared import subjects
from pagewire.shared.api_keys import ApiKeys
from pagewire.shared.bus import nats
from pagewire.shared.bus.nats import NatsBus
from pagewire.shared.config import MAX_STORE


@contextmanager
def running_broker(api_key: str = "", api_keys: ApiKeys | None = None) -> Iterator[Broker]:
    """A server on a free port, stopped and cleaned up at the end. On one loop, use `Broker` itself instead."""
    broker = Broker(port=0, api_key=api_key, api_keys=api_keys)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="broker")
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(broker.start(), loop).result(20)
        yield broker
    finally:
        asyncio.run_coroutine_threadsafe(broker.stop(), loop).result(20)
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


async def connect_service(broker: Broker, name: str = "test", max_store: int = MAX_STORE) -> NatsBus:
    """A connection with all rights, which has created the streams."""
    return await nats.connect(
        broker.url,
        name=name,
        user=broker.user,
        password=broker.password,
        inbox_prefix=SERVICE_INBOX,
        max_store=max_store,
        create_streams=True,
    )


async def connect_client(broker: Broker, *, api_key: str = "") -> NatsBus:
    """A connection with the rights of a client, without credentials unless there is a key."""
    user = "client" if api_key else ""
    return await nats.connect(broker.url, name="client", user=user, password=api_key, inbox_prefix=CLIENT_INBOX)


CLIENT_INBOX = "_INBOX"
SERVICE_INBOX = subjects.SERVICE_INBOX
