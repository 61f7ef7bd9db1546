"""Keys change while the broker runs: a new one is let in, a removed one is cut off, the others notice nothing."""

import asyncio
import os
from pathlib import Path

import pytest

from pagewire.embedded.broker import Broker
from pagewire.embedded.cluster import Cluster
from pagewire.shared.bus import nats
from pagewire.shared.bus.nats import NatsBus
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.security import api_keys
from pagewire.shared.security.api_keys import ApiKeys
from pagewire.shared.settings.config import Settings
from pagewire.shared.subjects import client_inbox
from tests.support.broker import connect_service
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio

FIRST = {"alice": "alice-key-0123456789", "bob": "bob-key-0123456789"}
SECOND = {"alice": FIRST["alice"], "carol": "carol-key-0123456789"}
OTHER_KEY = {"alice": "another-key-0123456789", "bob": FIRST["bob"]}


def write(path: Path, keys: dict[str, str]) -> None:
    new = path.with_suffix(".new")
    new.write_text("".join(f"{name}:{key}\n" for name, key in keys.items()))
    os.replace(new, path)


async def connect(broker: Broker, name: str, keys: dict[str, str]) -> NatsBus:
    return await nats.connect(
        broker.url, name=name, user=name, password=keys[name], inbox_prefix=client_inbox(name), connect_timeout=1.0
    )


async def refused(broker: Broker, name: str, keys: dict[str, str]) -> bool:
    try:
        await (await connect(broker, name, keys)).close()
    except ConfigurationError:
        return True
    return False


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(api_keys, "WATCH_INTERVAL", 0.02)
    path = tmp_path / "keys"
    write(path, FIRST)
    return path


@pytest.mark.parametrize(("then", "gone"), [(SECOND, "bob"), (OTHER_KEY, "alice")])
async def test_a_removed_key_is_cut_off_and_the_others_stay(path: Path, then: dict[str, str], gone: str) -> None:
    keys = ApiKeys.load(path)
    async with Broker(port=0, api_keys=keys) as broker, asyncio.timeout(PATIENCE):
        buses = {name: await connect(broker, name, FIRST) for name in FIRST}
        service = await connect_service(broker)
        lost: list[str] = []
        for name, bus in {**buses, "service": service}.items():
            bus.on_reconnect(lambda name=name: lost.append(name))  # type: ignore[misc]
        watching = asyncio.create_task(keys.watch(broker.reload))
        write(path, then)
        await until(lambda: not buses[gone].connected)
        assert await refused(broker, gone, FIRST)
        for name in then:
            assert not await refused(broker, name, then)
        stayed = ({"alice", "bob"} - {gone}).pop()
        await buses[stayed].flush()
        await service.flush()
        assert lost == []
        watching.cancel()
        for bus in (*buses.values(), service):
            await bus.close()


async def test_every_server_of_a_cluster_has_the_new_keys(path: Path) -> None:
    keys = ApiKeys.load(path)
    async with Cluster(Settings(nats_cluster=3, nats_port=0), keys) as cluster, asyncio.timeout(PATIENCE):
        write(path, SECOND)
        watching = asyncio.create_task(keys.watch(cluster.reload))
        for broker in cluster.brokers:
            while await refused(broker, "carol", SECOND) or not await refused(broker, "bob", FIRST):
                pass
        watching.cancel()


async def test_a_restarted_broker_has_the_current_keys(path: Path) -> None:
    keys = ApiKeys.load(path)
    async with Broker(port=0, api_keys=keys) as broker, asyncio.timeout(PATIENCE):
        watching = asyncio.create_task(keys.watch())
        write(path, SECOND)
        await until(lambda: "carol" in keys.passwords)
        broker.terminate()
        await broker.wait()
        await broker.start()
        assert not await refused(broker, "carol", SECOND)
        assert await refused(broker, "bob", FIRST)
        watching.cancel()
