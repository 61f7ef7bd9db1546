"""The first connection: what is wrong is said at once and clearly, and services may start before their broker."""

import asyncio
import os
import socket
from pathlib import Path
from urllib.parse import quote

import pytest

from pagewire.embedded.broker import Broker
from pagewire.shared.bus import nats
from pagewire.shared.errors import BusUnavailable, ConfigurationError
from tests.support.broker import CLIENT_INBOX, connect_service, plain_server
from tests.support.processes import free_port
from tests.support.waiting import PATIENCE
from tests.support.wire import FakeServer

pytestmark = pytest.mark.anyio


async def test_an_address_without_a_server_is_an_error() -> None:
    with pytest.raises(BusUnavailable, match=r"127\.0\.0\.1:\d+: .*refused|Connect call failed"):
        await nats.connect(f"nats://user:secret@127.0.0.1:{free_port()}", name="test", connect_timeout=0.2)


async def test_a_silent_server_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(BusUnavailable, match=f"127.0.0.1:{port}"):
            await nats.connect(f"nats://127.0.0.1:{port}", name="test", connect_timeout=0.2)


@pytest.mark.parametrize(
    "url", ["nats://127.0.0.1:port", "nats://", "http://127.0.0.1:4222", "localhost", "nats://[::1"]
)
async def test_a_malformed_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"nats://127\.0\.0\.1:4222"):
        await nats.connect(url, name="test", connect_timeout=0.2)


async def test_a_broker_that_starts_later_is_found() -> None:
    broker = Broker(port=free_port())
    connecting = asyncio.create_task(connect_service(broker))
    await asyncio.sleep(0)
    async with broker:
        bus = await connecting
        await bus.flush()
        await bus.close()


async def test_a_connection_that_breaks_at_once_is_an_error_or_made_again() -> None:
    async with FakeServer() as wire:
        bus = await nats.connect(wire.url, name="test", inbox_prefix=CLIENT_INBOX)
        again = asyncio.Event()
        bus.on_reconnect(again.set)
        wire.cut()
        async with asyncio.timeout(PATIENCE):
            await again.wait()
        await bus.flush()
        await bus.close()


async def test_a_flush_after_a_reconnection_is_a_barrier_again() -> None:
    """Pings that were never sent are not sent on the next connection: they would answer for later ones."""
    async with FakeServer() as wire:
        bus = await nats.connect(wire.url, name="test", inbox_prefix=CLIENT_INBOX)
        again = asyncio.Event()
        bus.on_reconnect(again.set)
        flushing = asyncio.create_task(bus.flush())
        await asyncio.sleep(0)  # its ping is in the buffer
        wire.commands.clear()
        bus._client.abort()
        with pytest.raises(BusUnavailable):
            await flushing
        async with asyncio.timeout(PATIENCE):
            await again.wait()
        bus.publish("a", b"x")
        await bus.flush()
        received = [command.split(" ")[0] for command in wire.commands]
        assert received[-2:] == ["PUB", "PING"]
        assert received.count("PING") == 3, "two of nats-py's own while it connects, and the barrier"
        await bus.close()


@pytest.mark.parametrize(("user", "password"), [("a", "p@ss:w/rd %"), ("b@c", "100%")])
async def test_credentials_in_a_url_are_percent_decoded(user: str, password: str, tmp_path: Path) -> None:
    config = tmp_path / "nats.conf"
    config.write_text(f'authorization {{ users = [{{ user: "{user}", password: "{password}" }}] }}')
    with plain_server(["-a", "127.0.0.1", "-p", "-1", "-c", str(config)], dict(os.environ)) as server:
        address = server.removeprefix("nats://")
        bus = await nats.connect(f"nats://{quote(user, '')}:{quote(password, '')}@{address}", name="test")
        assert bus.connected
        await bus.close()
        with pytest.raises(ConfigurationError, match="refuses these credentials"):
            await nats.connect(f"nats://{quote(user, '')}:wrong@{address}", name="test")


async def test_a_token_in_a_url_is_percent_decoded() -> None:
    with plain_server(["-a", "127.0.0.1", "-p", "-1", "--auth", "s/cret@1"], dict(os.environ)) as server:
        bus = await nats.connect(f"nats://s%2Fcret%401@{server.removeprefix('nats://')}", name="test")
        assert bus.connected
        await bus.close()
