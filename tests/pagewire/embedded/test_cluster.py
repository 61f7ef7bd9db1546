"""The servers that `pagewire serve --nats-cluster` starts: their ports, and that a dead one comes back."""

import os
import signal
import socket
from dataclasses import replace

import pytest

from pagewire import AsyncClient, SamplingParams
from pagewire.embedded.broker import HOST
from pagewire.embedded.cluster import Cluster, check_servers, memberships
from pagewire.embedded.programs import PIPELINE
from pagewire.embedded.stack import Stack
from pagewire.shared.bus import nats
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.settings.config import Settings
from pagewire.shared.subjects import service_inbox
from tests.support.broker import CLIENT_INBOX, connect_client, connect_service
from tests.support.checkpoints import checkpoint
from tests.support.waiting import until

pytestmark = [pytest.mark.alone, pytest.mark.anyio]


def three_free_ports() -> int:
    """The first of three ports in a row that are free."""
    while True:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            first = int(probe.getsockname()[1])
        try:
            for port in (first + 1, first + 2):
                with socket.socket() as probe:
                    probe.bind((HOST, port))
        except (OSError, OverflowError):
            continue
        return first


async def test_the_servers_take_the_ports_from_the_first_one_on() -> None:
    first = three_free_ports()
    async with Cluster(Settings(nats_cluster=3, nats_port=first)) as cluster:
        assert cluster.url == ",".join(f"nats://{HOST}:{port}" for port in (first, first + 1, first + 2))
        for broker in cluster.brokers:
            client = await connect_client(broker)
            await client.flush()
            await client.close()


async def test_servers_choose_other_ports_for_each_other_where_one_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        taken = int(other.getsockname()[1])
        members = memberships(3)
        choices = iter([[replace(members[0], port=taken), *members[1:]], memberships(3)])
        monkeypatch.setattr("pagewire.embedded.cluster.memberships", lambda count: next(choices))
        async with Cluster(Settings(nats_cluster=3, nats_port=0)) as cluster:
            bus = await connect_service(cluster)
            await bus.store.put_work("m", b"x")
            await bus.close()


async def test_a_single_server_works_without_a_cluster() -> None:
    async with Cluster(Settings(nats_port=0)) as cluster:
        bus = await connect_service(cluster)
        await bus.store.put_work("m", b"x")
        assert cluster.url == cluster.brokers[0].url
        await bus.close()


async def test_clients_need_the_key_at_every_server() -> None:
    async with Cluster(Settings(nats_cluster=3, nats_port=0, api_key="secret")) as cluster:
        for broker in cluster.brokers:
            client = await connect_client(broker, api_key="secret")
            assert client.new_inbox().startswith(CLIENT_INBOX)
            await client.close()
            with pytest.raises(ConfigurationError, match="refuses these credentials"):
                await connect_client(broker, api_key="wrong")


async def test_a_service_has_the_same_password_at_every_server() -> None:
    async with Cluster(Settings(nats_cluster=3, nats_port=0)) as cluster:
        for broker in cluster.brokers:
            inboxes = service_inbox("executor")
            password = cluster.passwords["executor"]
            bus = await nats.connect(broker.url, name="test", user="executor", password=password, inbox_prefix=inboxes)
            await bus.close()


async def test_a_port_in_use_ends_all_servers() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        cluster = Cluster(Settings(nats_cluster=3, nats_port=taken.getsockname()[1] - 1))
        with pytest.raises(ConfigurationError, match="is in use"):
            await cluster.start()
        with pytest.raises(ProcessLookupError):
            os.kill(cluster.brokers[0].pid, 0)


def test_doctor_counts_servers_and_copies() -> None:
    assert check_servers(Settings()) == "1 embedded; copies of what is stored: 1"
    assert check_servers(Settings(nats_cluster=5)) == "5 embedded; copies of what is stored: 3"


@pytest.mark.parametrize("servers", [1, pytest.param(3, marks=pytest.mark.full)])
async def test_a_server_of_a_stack_that_dies_is_started_again(servers: int) -> None:
    settings = Settings(model=str(checkpoint("llama")), dtype="float32", nats_cluster=3, nats_port=0, log_level="error")
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    async with Stack(settings, PIPELINE) as stack:
        address = await stack.ready()
        assert address.nats.count("nats://") == 3
        async with AsyncClient(address.nats) as client:
            expected = await client.generate("An old woman", sampling)
            for broker in stack.brokers[:servers]:
                before = broker.pid
                os.kill(before, signal.SIGKILL)
                await until(lambda broker=broker, before=before: broker.pid != before)  # type: ignore[misc]
                assert (await client.generate("An old woman", sampling)).choices == expected.choices
