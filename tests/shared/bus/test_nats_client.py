"""The bus over NATS where nats-py alone would lose messages, close the client or wait without end."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.metadata import version
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.protocol.parser import Parser
from structlog.testing import capture_logs

from pagewire.embedded.broker import Broker
from pagewire.shared.bus import Message, nats
from pagewire.shared.bus.nats import OUTBOUND_LIMIT, NatsBus
from pagewire.shared.errors import BusUnavailable, ConnectionLost, MessageTooLarge, NotPermitted, RequestTimeout
from tests.support.broker import connect_client, connect_service
from tests.support.processes import freeze
from tests.support.waiting import PATIENCE, until
from tests.support.wire import FakeServer

pytestmark = pytest.mark.anyio
BURST = 5000


def test_nats_py_has_the_internals_that_the_client_relies_on() -> None:
    """The version is pinned exactly in pyproject.toml; before an update, check the use of each of these."""
    assert version("nats-py") == "2.16.0"
    overridden = {"_send_ping", "_process_pong", "_process_msg", "_process_err", "_process_op_err"}
    assert overridden < set(vars(Client))
    used = {"_error_cb", "_flush_queue", "_pending", "_pending_data_size", "_pings_outstanding", "_pongs", "_ps"}
    used |= {"_sid", "_subs", "_transport"}
    client = Client()
    assert used < set(vars(client))
    assert Subscription(client, 1, "a")._id == 1
    assert {"buf", "needed", "state"} < set(vars(Parser(client)))


@asynccontextmanager
async def opened(connecting: Coroutine[Any, Any, NatsBus]) -> AsyncIterator[NatsBus]:
    """Closes the bus at the end of the block."""
    bus = await connecting
    try:
        yield bus
    finally:
        await bus.close()


async def restart(broker: Broker) -> None:
    """Starts a broker again that was killed."""
    await broker.wait()
    await broker.start()


def connect_to(server: FakeServer) -> Coroutine[Any, Any, NatsBus]:
    """Connects as a client, which needs no store."""
    return nats.connect(server.url, name="test", inbox_prefix="_INBOX")


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def on_both_loops(request: pytest.FixtureRequest) -> bool:
    """Sockets of the two event loops behave differently once they are closed."""
    return bool(request.param)


def order_of(server: FakeServer, *verbs: str) -> list[str]:
    """Returns those of the verbs that the server has received, in order."""
    return [verb for verb in (command.split(" ")[0] for command in server.commands) if verb in verbs]


async def test_a_flush_is_a_barrier() -> None:
    async with FakeServer() as server, opened(connect_to(server)) as bus:
        server.commands.clear()
        subscription = await bus.subscribe("a", lambda message: None)
        assert order_of(server, "PING", "SUB") == ["SUB", "PING"]
        server.commands.clear()
        await subscription.unsubscribe()
        assert order_of(server, "PING", "UNSUB") == ["UNSUB", "PING"]
        server.commands.clear()
        bus.publish("b", b"x")
        await bus.flush()
        assert order_of(server, "PING", "PUB") == ["PUB", "PING"]


async def test_the_late_answer_to_a_flush_does_not_end_the_read_loop() -> None:
    async with FakeServer() as server, opened(connect_to(server)) as bus:
        received: list[bytes] = []
        await bus.subscribe("a", lambda message: received.append(message.data))
        server.holding = True
        with pytest.raises(RequestTimeout):
            await bus.flush(timeout=0.05)
        server.release()
        server.say("MSG a 2 2\r\nhi\r\n")  # 1 is the inbox of the bus
        await until(lambda: received)
        await bus.flush()


async def test_a_handler_that_is_cancelled_keeps_its_subscription(server: Broker) -> None:
    async with opened(connect_service(server)) as bus:
        received: list[bytes] = []

        def handler(message: Message) -> None:
            received.append(message.data)
            raise asyncio.CancelledError

        await bus.subscribe("cancelled", handler)
        for data in (b"1", b"2"):
            bus.publish("cancelled", data)
        await until(lambda: received == [b"1", b"2"])


async def test_after_an_error_of_the_server_the_subscriptions_are_restored() -> None:
    async with FakeServer() as server, opened(connect_to(server)) as bus:
        received: list[bytes] = []
        again = asyncio.Event()
        await bus.subscribe("a", lambda message: received.append(message.data))
        bus.on_reconnect(again.set)
        server.say("-ERR 'Permissions Violation for Publish to \"x\"'\r\n")
        server.say("-ERR 'Maximum Payload Violation'\r\n")
        async with asyncio.timeout(PATIENCE):
            await again.wait()
        assert server.connections == 2
        server.say("MSG a 2 2\r\nhi\r\n")
        await until(lambda: received == [b"hi"])


async def test_a_callback_that_raises_does_not_stop_the_others() -> None:
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    async with FakeServer() as server, opened(connect_to(server)) as bus:
        again = asyncio.Event()
        bus.on_reconnect(partial(setattr, None, "nothing", "can be set"))
        bus.on_reconnect(again.set)
        server.say("-ERR 'Stale Connection'\r\n")
        async with asyncio.timeout(PATIENCE):
            await again.wait()
        await bus.flush()
        assert len(failures) == 1


async def test_headers_and_payload_that_are_too_large_are_refused(server: Broker) -> None:
    async with opened(connect_service(server)) as bus:
        with pytest.raises(MessageTooLarge):
            bus.publish("large", bytes(bus.max_payload), headers={"a": "b"})
        with pytest.raises(MessageTooLarge):
            bus.publish("a", b"", reply="_INBOX." + "x" * 5000)
        await bus.flush()


async def test_a_forbidden_subject_fails_at_once(server: Broker) -> None:
    async with opened(connect_client(server)) as bus:
        with capture_logs() as lines:
            with pytest.raises(NotPermitted, match=r"pagewire\.svc\.claim"):
                await bus.request("pagewire.svc.Claim", b"", timeout=PATIENCE)
            with pytest.raises(NotPermitted, match=r"_SVC\.>"):
                await bus.subscribe("_SVC.>", lambda message: None)
        denied = [line["log_level"] for line in lines if line["event"] == "permission_denied"]
        assert denied == ["error", "error"]


async def test_no_message_of_a_burst_is_dropped(server: Broker) -> None:
    async with opened(connect_service(server)) as bus:
        received: list[bytes] = []
        await bus.subscribe("burst", lambda message: received.append(message.data))
        for _ in range(BURST):
            bus.publish("burst", b"x")
        await until(lambda: len(received) == BURST)


async def test_subscriptions_get_messages_in_the_order_of_the_server(server: Broker) -> None:
    async with opened(connect_service(server)) as bus:
        received: list[int] = []
        await bus.subscribe("one", lambda message: received.append(int(message.data)))
        await bus.subscribe("two", lambda message: received.append(int(message.data)))
        for number in range(BURST):
            bus.publish("one" if number % 2 else "two", b"%d" % number)
        await until(lambda: len(received) == BURST)
        assert received == sorted(received)


class TestALostServer:
    @pytest.fixture
    def anyio_backend(self, on_both_loops: bool) -> tuple[str, dict[str, bool]]:
        return "asyncio", {"use_uvloop": on_both_loops}

    async def test_requests_fail_at_once_and_the_bus_reconnects(self) -> None:
        async with Broker(port=0) as broker, opened(connect_service(broker)) as bus:
            requests: list[Message] = []
            await bus.subscribe("silent", requests.append)
            again = asyncio.Event()
            bus.on_reconnect(again.set)
            waiting = asyncio.create_task(bus.request("silent", b"", timeout=60))
            streaming = asyncio.ensure_future(anext(bus.request_many("silent", b"", stall=60)))
            pulling = asyncio.create_task(bus.store.pull_work("m", 1, expires=60))
            await until(lambda: len(requests) == 2)
            os.kill(broker.pid, signal.SIGKILL)
            for task in (waiting, streaming):
                with pytest.raises(BusUnavailable):
                    await task
            assert await pulling == []
            for operation in (bus.flush(), bus.request("silent", b"", timeout=60)):
                with pytest.raises(BusUnavailable):
                    await operation
            bus.publish("silent", b"in the outage")
            pulling = asyncio.create_task(bus.store.pull_work("m", 1, expires=60))
            assert await broker.wait() == -signal.SIGKILL
            await broker.start()
            async with asyncio.timeout(PATIENCE):
                await again.wait()
            await until(lambda: requests[-1].data == b"in the outage")
            await bus.store.put_work("m", b"x")
            assert [item.data for item in await pulling] == [b"x"]

    async def test_the_bus_survives_many_restarts(self) -> None:
        async with Broker(port=0) as broker, opened(connect_service(broker)) as bus:
            await bus.subscribe("echo", lambda message: bus.publish(message.reply, message.data))
            for _ in range(8):
                os.kill(broker.pid, signal.SIGKILL)
                await broker.wait()
                await until(lambda: not bus.connected)
                await broker.start()
                async with asyncio.timeout(PATIENCE):
                    await bus.wait_connected()
                assert (await bus.request("echo", b"here", timeout=30)).data == b"here"

    async def test_a_connection_is_awaited_from_the_moment_it_is_lost(self) -> None:
        async with Broker(port=0) as broker, opened(connect_service(broker)) as bus:
            os.kill(broker.pid, signal.SIGKILL)
            restarting = asyncio.create_task(restart(broker))
            while bus.connected:  # noqa: ASYNC110 - looks in every turn of the loop
                await asyncio.sleep(0)
            async with asyncio.timeout(PATIENCE):
                await bus.wait_connected()
            await bus.flush()  # there is a connection
            await restarting

    async def test_the_bus_can_be_used_and_closed(self) -> None:
        async with Broker(port=0) as broker:
            bus = await connect_service(broker)
            subscription = await bus.subscribe("a", lambda message: None)
            os.kill(broker.pid, signal.SIGKILL)
            await until(lambda: not bus.connected)
            bus.publish("a", b"x" * 100)
            assert 100 < bus.backlog() < 1000
            await subscription.unsubscribe()
            with pytest.raises(ConnectionLost):
                await bus.subscribe("b", lambda message: None)
            with pytest.raises(ConnectionLost):
                await bus.store.put_work("m", b"x")
            async with asyncio.timeout(PATIENCE):
                await bus.close()


class TestAFrozenServer:
    """A server that is stopped keeps its connections open and reads nothing."""

    @pytest.fixture
    def anyio_backend(self, on_both_loops: bool) -> tuple[str, dict[str, bool]]:
        return "asyncio", {"use_uvloop": on_both_loops}

    async def test_publishing_never_waits(self) -> None:
        async with Broker(port=0) as broker, opened(connect_service(broker)) as bus:
            received: list[bytes] = []
            await bus.subscribe("much", lambda message: received.append(message.data[:4]))
            await freeze(broker.pid)
            sent = 0
            try:
                with suppress(BusUnavailable):
                    while sent < 200:
                        bus.publish("much", b"%04d" % sent + bytes(1 << 20))
                        sent += 1
                        await asyncio.sleep(0)
                with pytest.raises(BusUnavailable, match="outbound buffer"):
                    bus.publish("much", bytes(1 << 20))
                assert OUTBOUND_LIMIT - (2 << 20) < bus.backlog() < 3 * OUTBOUND_LIMIT
            finally:
                os.kill(broker.pid, signal.SIGCONT)
            await until(lambda: len(received) == sent)
            assert received == [b"%04d" % number for number in range(sent)]
            assert bus.backlog() == 0

    async def test_the_connection_is_given_up_although_data_is_unsent(self) -> None:
        async with Broker(port=0) as broker, opened(connect_service(broker)) as bus:
            again = asyncio.Event()
            bus.on_reconnect(again.set)
            await freeze(broker.pid)
            bus.publish("a", bytes(8_000_000))
            await until(lambda: not bus.connected)
            os.kill(broker.pid, signal.SIGKILL)
            await broker.wait()
            await broker.start()
            async with asyncio.timeout(PATIENCE):
                await again.wait()
            await bus.flush()

    async def test_closing_ends_in_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nats, "CLOSE_TIMEOUT", 0.2)
        async with Broker(port=0) as broker:
            bus = await connect_service(broker)
            await freeze(broker.pid)
            try:
                bus.publish("a", bytes(8_000_000))
                async with asyncio.timeout(PATIENCE):
                    await bus.close()
            finally:
                os.kill(broker.pid, signal.SIGCONT)
