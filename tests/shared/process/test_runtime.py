"""Services in processes of their own, against a real broker; and the same core on the memory bus."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pagewire.embedded.broker import Broker
from pagewire.shared import subjects
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.errors import BusUnavailable
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.process import heartbeater
from pagewire.shared.process.context import Context
from pagewire.shared.process.linux_process import END_NOW, INSTANCE, PARENT, STOP
from pagewire.shared.process.peers import Peers
from pagewire.shared.process.runtime import Shutdown, run_service
from pagewire.shared.settings.config import Settings, to_environment
from tests.support.broker import connect_service, plain_server, running_broker
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

BODY = """
import asyncio
import os
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.process.runtime import main

class Service:
    def __init__(self, context):
        self.context = context
        if context.settings.model == "bad":
            raise ConfigurationError("there is no folder bad: give an existing one")
        if context.settings.model == "broken":
            raise ZeroDivisionError("a bug")

    def heartbeat(self):
        return Heartbeat("probe", self.context.instance, True, 0, 0, 0, {})

    def metrics(self):
        return ()

    async def drain(self):
        print("drains", self.context.follows().name, flush=True)
        while self.context.settings.model == "busy":
            await asyncio.sleep(0.01)

    async def run(self):
        try:
            await asyncio.Event().wait()
        finally:
            print("cleaned up", flush=True)
            if self.context.settings.model == "stuck":
                while True:
                    try:
                        await asyncio.sleep(60)
                    except asyncio.CancelledError:
                        pass

import pagewire.shared.process.runtime
pagewire.shared.process.runtime.CLOSE_WITHIN = 0.5
main(os.environ.get("SERVICE", "probe"), Service)
"""


@contextmanager
def service(broker: Broker | None, model: str = "", **environ: str) -> Iterator[subprocess.Popen[str]]:
    url = broker.url if broker is not None else "nats://127.0.0.1:1"
    user, password = (broker.user, broker.password) if broker is not None else ("", "")
    settings = Settings(model=model, nats_url=url, nats_user=user, nats_password=password, log_format="json")
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(BODY)],
        env={**os.environ, **to_environment(settings), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def wait_for_heartbeat(broker: Broker, instance: str) -> None:
    """Returns once a heartbeat of the instance has come."""
    bus = await connect_service(broker)
    peers = Peers(bus)
    await peers.listen("probe")
    await until(lambda: peers.find(instance))
    await bus.close()


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with running_broker() as running:
        yield running


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_a_service_in_order(broker: Broker, number: signal.Signals) -> None:
    with service(broker, **{INSTANCE: "probe1"}) as process:
        await wait_for_heartbeat(broker, "probe1")
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == "drains ALONE\ncleaned up\n"
    events = [json.loads(line) for line in err.splitlines()]
    assert [event["event"] for event in events] == ["connected", "draining", "stopping"]
    assert all(event["service"] == "probe" and event["instance"] == "probe1" for event in events)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT, END_NOW])
async def test_a_second_signal_ends_the_drain(broker: Broker, second: signal.Signals) -> None:
    with service(broker, model="busy", **{INSTANCE: "probe4"}) as process:
        await wait_for_heartbeat(broker, "probe4")
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "drains ALONE\n"
        process.send_signal(second)
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "cleaned up\n")


async def test_a_drain_that_takes_too_long_is_ended(broker: Broker) -> None:
    with service(broker, model="busy", **{INSTANCE: "probe5", "PAGEWIRE_DRAIN_TIMEOUT": "0.2"}) as process:
        await wait_for_heartbeat(broker, "probe5")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "drains ALONE\ncleaned up\n")
    assert "not_drained_in_time" in err


async def test_a_supervisor_can_end_a_service_without_a_drain(broker: Broker) -> None:
    with service(broker, **{INSTANCE: "probe6"}) as process:
        await wait_for_heartbeat(broker, "probe6")
        process.send_signal(END_NOW)
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "cleaned up\n")


@pytest.mark.parametrize(("number", "follows"), [(signal.SIGTERM, "SUCCESSOR"), (STOP, "STOP")])
async def test_a_service_knows_whether_its_supervisor_starts_another(
    broker: Broker, number: signal.Signals, follows: str
) -> None:
    with service(broker, **{INSTANCE: "probe7", PARENT: str(os.getpid())}) as process:
        await wait_for_heartbeat(broker, "probe7")
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    assert out == f"drains {follows}\ncleaned up\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this way of scheduling")
async def test_a_service_is_scheduled_in_batches(broker: Broker) -> None:
    with service(broker, **{INSTANCE: "probe3"}) as process:
        await wait_for_heartbeat(broker, "probe3")
        assert os.sched_getscheduler(process.pid) == os.SCHED_BATCH


async def test_a_service_that_does_not_end_is_killed(broker: Broker) -> None:
    with service(broker, model="stuck", **{INSTANCE: "probe2"}) as process:
        await wait_for_heartbeat(broker, "probe2")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "not_stopped_in_time" in err


def test_refused_settings_are_one_line_and_exit_code_2(broker: Broker) -> None:
    with service(broker, model="bad") as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.splitlines()[-1] == "probe: there is no folder bad: give an existing one"
    assert "Traceback" not in err


def test_a_setting_of_the_wrong_kind_is_refused_before_anything_starts() -> None:
    with service(None, PAGEWIRE_MAX_NUM_SEQS="many") as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.startswith("probe: invalid setting")
    assert len(err.splitlines()) == 1


def test_a_fault_is_logged_and_exit_code_1(broker: Broker) -> None:
    with service(broker, model="broken") as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ZeroDivisionError" in err
    assert broker.password not in err


def test_a_service_without_a_broker_tries_again() -> None:
    with service(None) as process:
        assert process.stderr is not None
        first = json.loads(process.stderr.readline())
        assert first["event"] == "broker_unreachable"
        assert "127.0.0.1:1" in first["reason"]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_service_that_stores_waits_for_jetstream() -> None:
    """It may be back later, as when the disk has room again."""
    with (
        plain_server(["--addr", "127.0.0.1", "--port", "-1"], {}) as url,
        service(None, PAGEWIRE_NATS_URL=url, SERVICE="scheduler") as process,
    ):
        assert process.stderr is not None
        first = json.loads(process.stderr.readline())
        assert (first["event"], first["level"]) == ("store_unavailable", "warning")
        assert "--jetstream" in first["reason"]
        assert json.loads(process.stderr.readline())["event"] == "store_unavailable"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_service_does_not_outlive_its_supervisor() -> None:
    with service(None, **{PARENT: "1"}) as process:
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


class Counting:
    """A service that counts what the runtime asks of it."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.beats = 0
        self.drains = 0
        self.may_end = asyncio.Event()
        self.ended = False

    def heartbeat(self) -> Heartbeat:
        self.beats += 1
        return Heartbeat("probe", self.context.instance, False, 0, 0, 0, {})

    def metrics(self) -> tuple[()]:
        return ()

    async def drain(self) -> None:
        self.drains += 1
        await asyncio.wait_for(self.may_end.wait(), 60)

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True


@pytest.mark.parametrize(("interval", "announces"), [(0.02, False), (600, True)])
async def test_heartbeats_come_regularly_and_on_demand(
    interval: float, announces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeater, "INTERVAL", interval)
    built: list[Counting] = []

    def build(context: Context) -> Counting:
        context.announce()  # a service may do so before it is built
        built.append(Counting(context))
        return built[0]

    broker = MemoryBroker()
    beats: list[object] = []
    await MemoryBus(broker).subscribe(f"{subjects.HEARTBEAT}.probe.i1", beats.append)
    running = asyncio.create_task(run_service("probe", build, Settings(), MemoryBus(broker), "i1"))
    await until(lambda: beats)
    if announces:
        built[0].context.announce()
    await until(lambda: len(beats) >= (2 if announces else 5))
    running.cancel()
    await asyncio.wait({running})
    assert built[0].ended


async def test_a_draining_service_announces_it_and_ends_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeater, "INTERVAL", 600)
    built: list[Counting] = []
    broker, shutdown = MemoryBroker(), Shutdown()
    bus = MemoryBus(broker)
    peers = Peers(bus)
    await peers.listen("probe")

    def build(context: Context) -> Counting:
        built.append(Counting(context))
        return built[0]

    running = asyncio.create_task(run_service("probe", build, Settings(), MemoryBus(broker), "i1", shutdown))
    await until(lambda: peers.find("i1"))
    shutdown.draining.set()
    await until(lambda: (beat := peers.find("i1")) is not None and beat.draining and not beat.ready)
    reply = await MemoryBus(broker, inbox_prefix="_INBOX").request("$SRV.STATS.pagewire-probe", b"", timeout=1)
    assert json.loads(reply.data)["metadata"]["draining"] == "true"
    assert (built[0].drains, running.done()) == (1, False)
    built[0].may_end.set()
    await asyncio.wait_for(running, 5)
    assert built[0].ended
    await bus.close()


async def test_a_failed_service_sends_no_heartbeat() -> None:
    class Failing(Counting):
        async def run(self) -> None:
            raise BusUnavailable("gone")

    before = asyncio.all_tasks()
    with pytest.raises(BusUnavailable, match="gone"):
        await run_service("probe", Failing, Settings(), MemoryBus(MemoryBroker()), "i1")
    assert asyncio.all_tasks() == before


async def test_a_connection_lost_for_good_ends_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeater, "INTERVAL", 0.01)
    monkeypatch.setattr(heartbeater, "LOST_AFTER", 0.03)
    bus = MemoryBus(MemoryBroker())
    running = asyncio.create_task(run_service("probe", Counting, Settings(), bus, "i1"))
    await asyncio.sleep(0.02)
    await bus.close()
    with pytest.raises(BusUnavailable, match="no broker"):
        await running
