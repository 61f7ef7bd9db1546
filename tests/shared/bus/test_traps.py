"""What nats-py does wrong, and that our bus does not: each scenario runs on both.

A test fails here when nats-py mends a defect: then our mending of it can go.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import nats
import nats.errors
import pytest
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg

from pagewire.embedded.broker import Broker
from pagewire.shared.bus import Message
from pagewire.shared.bus import nats as our_nats
from pagewire.shared.bus.nats import OUTBOUND_LIMIT, NatsBus
from pagewire.shared.errors import BusUnavailable, ConnectionLost, MessageTooLarge, NotPermitted, RequestTimeout
from tests.support.broker import connect_client, connect_service
from tests.support.waiting import until
from tests.support.wire import FakeServer

RunLoop = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run_loop(request: pytest.FixtureRequest) -> RunLoop:
    """Both event loops: their sockets behave differently once they are closed."""
    run: RunLoop = request.param
    return run


async def ignore_error(error: Exception) -> None:
    """nats-py's own error callback logs."""


async def ignore_message(message: Msg) -> None:
    """A handler for when only the interest matters."""


@asynccontextmanager
async def plain_client(broker: Broker, **options: Any) -> AsyncIterator[Client]:
    """nats-py as it is, with the rights of a service."""
    options = {"error_cb": ignore_error, "user": broker.user, "password": broker.password, **options}
    client = await nats.connect(broker.url, **options)
    try:
        yield client
    finally:
        with suppress(OSError):  # raised by a close after a lost connection
            await client.close()


@asynccontextmanager
async def plain_on_wire(wire: FakeServer, **options: Any) -> AsyncIterator[Client]:
    client = await nats.connect(wire.url, **{"error_cb": ignore_error, **options})
    try:
        yield client
    finally:
        with suppress(OSError):  # raised by a close after a lost connection
            await client.close()


@asynccontextmanager
async def our_bus(opening: Coroutine[Any, Any, NatsBus]) -> AsyncIterator[NatsBus]:
    bus = await opening
    try:
        yield bus
    finally:
        await bus.close()


def ours_on_wire(wire: FakeServer) -> Coroutine[Any, Any, NatsBus]:
    """Our bus as a client: nothing but the protocol, no store."""
    return our_nats.connect(wire.url, name="test", inbox_prefix="_INBOX")


def order_of(wire: FakeServer, *verbs: str) -> list[str]:
    """Which of the verbs the server heard, in order."""
    return [verb for verb in (command.split(" ")[0] for command in wire.commands) if verb in verbs]


class TestFlushIsABarrier:
    def test_nats_py_sends_the_ping_before_the_subscription(self) -> None:
        async def main() -> None:
            async with FakeServer() as wire, plain_on_wire(wire) as client:
                wire.commands.clear()
                subscription = await client.subscribe("a", cb=ignore_message)
                await client.flush()
                await client.flush()
                assert order_of(wire, "PING", "SUB") == ["PING", "SUB", "PING"]
                wire.commands.clear()
                await subscription.drain()
                await client.flush()
                assert order_of(wire, "PING", "UNSUB") == ["PING", "UNSUB", "PING"]

        asyncio.run(main())

    def test_ours_sends_it_behind(self) -> None:
        async def main() -> None:
            async with FakeServer() as wire, our_bus(ours_on_wire(wire)) as bus:
                wire.commands.clear()
                subscription = await bus.subscribe("a", lambda message: None)
                assert order_of(wire, "PING", "SUB") == ["SUB", "PING"]
                wire.commands.clear()
                await subscription.unsubscribe()
                assert order_of(wire, "PING", "UNSUB") == ["UNSUB", "PING"]
                wire.commands.clear()
                bus.publish("b", b"x")
                await bus.flush()
                assert order_of(wire, "PING", "PUB") == ["PUB", "PING"]

        asyncio.run(main())


class TestAPingThatNobodyAwaitsAnyMore:
    """A flush that timed out; its answer comes later, and a message behind it."""

    def test_its_answer_ends_the_read_loop_of_nats_py(self) -> None:
        async def main() -> None:
            async with FakeServer() as wire, plain_on_wire(wire) as client:
                heard: list[Msg] = []

                async def handler(message: Msg) -> None:
                    heard.append(message)

                await client.subscribe("a", cb=handler)
                await client.flush()
                wire.holding = True
                with pytest.raises(nats.errors.FlushTimeoutError):
                    await client.flush(timeout=0.05)
                await until(lambda: wire.commands[-1] == "PING")
                wire.release()
                wire.say("MSG a 1 2\r\nhi\r\n")
                await until(client._reading_task.done)
                assert client.is_connected, "it does not even know"
                assert not heard

        asyncio.run(main())

    def test_ours_reads_on(self) -> None:
        async def main() -> None:
            async with FakeServer() as wire, our_bus(ours_on_wire(wire)) as bus:
                heard: list[bytes] = []
                await bus.subscribe("a", lambda message: heard.append(message.data))
                wire.holding = True
                with pytest.raises(RequestTimeout):
                    await bus.flush(timeout=0.05)
                wire.release()
                wire.say("MSG a 2 2\r\nhi\r\n")  # 1 is the inbox of the bus
                await until(lambda: heard)
                await bus.flush()

        asyncio.run(main())


class TestAHandlerThatIsCancelled:
    def test_it_ends_the_subscription_of_nats_py(self, server: Broker) -> None:
        async def main() -> None:
            async with plain_client(server) as client:
                heard: list[bytes] = []

                async def handler(message: Msg) -> None:
                    heard.append(message.data)
                    raise asyncio.CancelledError

                subscription = await client.subscribe("cancelled", cb=handler)
                for data in (b"1", b"2"):
                    await client.publish("cancelled", data)
                await client.flush()
                await until(subscription._wait_for_msgs_task.done)
                assert heard == [b"1"]

        asyncio.run(main())

    def test_ours_goes_on(self, server: Broker) -> None:
        async def main() -> None:
            async with our_bus(connect_service(server)) as bus:
                heard: list[bytes] = []

                def handler(message: Message) -> None:
                    heard.append(message.data)
                    raise asyncio.CancelledError

                await bus.subscribe("cancelled", handler)
                for data in (b"1", b"2"):
                    bus.publish("cancelled", data)
                await until(lambda: heard == [b"1", b"2"])

        asyncio.run(main())


class TestAnErrorFromTheServer:
    def test_an_error_callback_that_raises_ends_the_read_loop_of_nats_py(self) -> None:
        async def main() -> None:
            async def error_callback(error: Exception) -> None:
                raise error

            async with FakeServer() as wire, plain_on_wire(wire, error_cb=error_callback) as client:
                wire.say("-ERR 'Permissions Violation for Publish to \"x\"'\r\n")
                await until(client._reading_task.done)
                assert client.is_connected, "it does not even know"

        asyncio.run(main())

    def test_it_closes_nats_py_for_good(self) -> None:
        async def main() -> None:
            async with FakeServer() as wire, plain_on_wire(wire) as client:
                wire.say("-ERR 'Maximum Payload Violation'\r\n")
                await until(lambda: client.is_closed)
                assert wire.connections == 1

        asyncio.run(main())

    def test_ours_connects_again_with_its_subscriptions(self) -> None:
        async def main() -> None:
            async with FakeServer() as wire, our_bus(ours_on_wire(wire)) as bus:
                heard: list[bytes] = []
                again = asyncio.Event()
                await bus.subscribe("a", lambda message: heard.append(message.data))
                bus.on_reconnect(again.set)
                wire.say("-ERR 'Permissions Violation for Publish to \"x\"'\r\n")
                wire.say("-ERR 'Maximum Payload Violation'\r\n")
                async with asyncio.timeout(5):
                    await again.wait()
                assert wire.connections == 2
                wire.say("MSG a 2 2\r\nhi\r\n")
                await until(lambda: heard == [b"hi"])

        asyncio.run(main())

    def test_a_callback_that_raises_does_not_stop_ours(self) -> None:
        async def main() -> None:
            failures: list[dict[str, Any]] = []
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
            async with FakeServer() as wire, our_bus(ours_on_wire(wire)) as bus:
                again = asyncio.Event()
                bus.on_reconnect(partial(setattr, None, "nothing", "can be set"))
                bus.on_reconnect(again.set)
                wire.say("-ERR 'Stale Connection'\r\n")
                async with asyncio.timeout(5):
                    await again.wait()
                await bus.flush()
                assert len(failures) == 1

        asyncio.run(main())


class TestHeaderAndPayloadTooLarge:
    def test_nats_py_sends_it_and_is_closed_for_good(self, server: Broker) -> None:
        async def main() -> None:
            async with plain_client(server) as client:
                await client.publish("large", bytes(client.max_payload), headers={"a": "b"})
                await until(lambda: client.is_closed)

        asyncio.run(main())

    def test_ours_refuses_it(self, server: Broker) -> None:
        async def main() -> None:
            async with our_bus(connect_service(server)) as bus:
                with pytest.raises(MessageTooLarge):
                    bus.publish("large", bytes(bus.max_payload), headers={"a": "b"})
                with pytest.raises(MessageTooLarge):
                    bus.publish("a", b"", reply="_INBOX." + "x" * 5000)
                await bus.flush()

        asyncio.run(main())


class TestAForbiddenSubject:
    def test_a_request_of_nats_py_waits_for_its_whole_time(self, server: Broker) -> None:
        async def main() -> None:
            errors: list[Exception] = []

            async def error_callback(error: Exception) -> None:
                errors.append(error)

            async with plain_client(server, user=None, password=None, error_cb=error_callback) as client:
                with pytest.raises(nats.errors.TimeoutError):
                    await client.request("pagewire.svc.claim", b"", timeout=0.5)
                assert errors

        asyncio.run(main())

    def test_ours_fails_at_once(self, server: Broker) -> None:
        async def main() -> None:
            async with our_bus(connect_client(server)) as bus:
                loop = asyncio.get_running_loop()
                started = loop.time()
                with pytest.raises(NotPermitted, match=r"pagewire\.svc\.claim"):
                    await bus.request("pagewire.svc.Claim", b"", timeout=30)
                with pytest.raises(NotPermitted, match=r"_SVC\.>"):
                    await bus.subscribe("_SVC.>", lambda message: None)
                assert loop.time() - started < 5

        asyncio.run(main())


class TestManyMessagesAtOnce:
    BURST = 5000

    def test_a_bounded_subscription_of_nats_py_drops_them(self, server: Broker) -> None:
        async def main() -> None:
            errors: list[Exception] = []
            heard: list[bytes] = []

            async def error_callback(error: Exception) -> None:
                errors.append(error)

            async def handler(message: Msg) -> None:
                heard.append(message.data)

            async with plain_client(server, error_cb=error_callback) as client:
                await client.subscribe("burst", cb=handler, pending_msgs_limit=100)
                for _ in range(self.BURST):
                    await client.publish("burst", b"x")
                await client.flush()
                await until(lambda: len(errors) + len(heard) == self.BURST)
                assert all(isinstance(error, nats.errors.SlowConsumerError) for error in errors)
                assert len(heard) < self.BURST

        asyncio.run(main())

    def test_ours_holds_none_and_drops_none(self, server: Broker) -> None:
        async def main() -> None:
            async with our_bus(connect_service(server)) as bus:
                heard: list[bytes] = []
                await bus.subscribe("burst", lambda message: heard.append(message.data))
                for _ in range(self.BURST):
                    bus.publish("burst", b"x")
                await until(lambda: len(heard) == self.BURST)

        asyncio.run(main())

    def test_nats_py_mixes_up_two_subscriptions(self, server: Broker) -> None:
        async def main() -> None:
            heard: list[int] = []

            async def handler(message: Msg) -> None:
                heard.append(int(message.data))

            async with plain_client(server) as client:
                await client.subscribe("one", cb=handler)
                await client.subscribe("two", cb=handler)
                for number in range(self.BURST):
                    await client.publish("one" if number % 2 else "two", b"%d" % number)
                await until(lambda: len(heard) == self.BURST)
                assert heard != sorted(heard)

        asyncio.run(main())

    def test_ours_delivers_as_the_server_sent(self, server: Broker) -> None:
        async def main() -> None:
            async with our_bus(connect_service(server)) as bus:
                heard: list[int] = []
                await bus.subscribe("one", lambda message: heard.append(int(message.data)))
                await bus.subscribe("two", lambda message: heard.append(int(message.data)))
                for number in range(self.BURST):
                    bus.publish("one" if number % 2 else "two", b"%d" % number)
                await until(lambda: len(heard) == self.BURST)
                assert heard == sorted(heard)

        asyncio.run(main())


class TestALostServer:
    def test_a_request_of_nats_py_waits_for_its_whole_time(self) -> None:
        async def main() -> None:
            async with Broker(port=0) as broker, plain_client(broker) as client:
                await client.subscribe("silent", cb=ignore_message)
                waiting = asyncio.create_task(client.request("silent", b"", timeout=1.0))
                await until(lambda: client.stats["in_msgs"])
                os.kill(broker.pid, signal.SIGKILL)
                await until(lambda: client.is_reconnecting)
                assert not waiting.done()
                with pytest.raises(nats.errors.TimeoutError):
                    await waiting

        asyncio.run(main())

    def test_ours_fails_at_once_and_comes_back(self, run_loop: RunLoop) -> None:
        async def main() -> None:
            async with Broker(port=0) as broker, our_bus(connect_service(broker)) as bus:
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
                async with asyncio.timeout(5):
                    await again.wait()
                await until(lambda: requests[-1].data == b"in the outage")
                await bus.store.put_work("m", b"x")
                assert [item.data for item in await pulling] == [b"x"]

        run_loop(main())

    def test_ours_survives_many_restarts(self, run_loop: RunLoop) -> None:
        async def main() -> None:
            async with Broker(port=0) as broker, our_bus(connect_service(broker)) as bus:
                await bus.subscribe("echo", lambda message: bus.publish(message.reply, message.data))
                for _ in range(8):
                    os.kill(broker.pid, signal.SIGKILL)
                    await broker.wait()
                    await until(lambda: not bus.connected)
                    await broker.start()
                    async with asyncio.timeout(5):
                        await bus.wait_connected()
                    assert (await bus.request("echo", b"here", timeout=30)).data == b"here"

        run_loop(main())

    def test_ours_can_be_used_and_closed_without_it(self, run_loop: RunLoop) -> None:
        async def main() -> None:
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
                async with asyncio.timeout(3):
                    await bus.close()

        run_loop(main())


class TestAFrozenServer:
    """A server that is stopped keeps its connections open and reads nothing."""

    def test_publishing_with_nats_py_waits_without_end_and_swallows_its_cancellation(self) -> None:
        async def main() -> None:
            async with Broker(port=0) as broker, plain_client(broker) as client:
                os.kill(broker.pid, signal.SIGSTOP)
                try:
                    blocked = asyncio.create_task(self.publish_much(client))
                    for _ in range(2):
                        done, _ = await asyncio.wait({blocked}, timeout=0.5)
                        assert not done
                        blocked.cancel()
                finally:
                    os.kill(broker.pid, signal.SIGCONT)
                await asyncio.wait({blocked})
                assert not blocked.cancelled()

        asyncio.run(main())

    def test_publishing_with_ours_never_waits(self, run_loop: RunLoop) -> None:
        async def main() -> None:
            async with Broker(port=0) as broker, our_bus(connect_service(broker)) as bus:
                heard: list[bytes] = []
                await bus.subscribe("much", lambda message: heard.append(message.data[:4]))
                os.kill(broker.pid, signal.SIGSTOP)
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
                await until(lambda: len(heard) == sent, timeout=15)
                assert heard == [b"%04d" % number for number in range(sent)]
                assert bus.backlog() == 0

        run_loop(main())

    def test_what_is_unsent_keeps_nats_py_from_giving_it_up_and_not_ours(self) -> None:
        async def main() -> None:
            told = asyncio.Event()

            async def disconnected_callback() -> None:
                told.set()

            async with (
                Broker(port=0) as broker,
                plain_client(broker, ping_interval=1, disconnected_cb=disconnected_callback) as client,
                our_bus(connect_service(broker)) as bus,
            ):
                again = asyncio.Event()
                bus.on_reconnect(again.set)
                os.kill(broker.pid, signal.SIGSTOP)
                client._transport.write(b"PUB a 8000000\r\n" + bytes(8_000_000) + b"\r\n")
                bus.publish("a", bytes(8_000_000))
                await until(lambda: client.is_reconnecting and not bus.connected, timeout=30)
                assert not told.is_set(), "it waits for the frozen server to read the rest"
                os.kill(broker.pid, signal.SIGKILL)
                await broker.wait()
                await broker.start()
                async with asyncio.timeout(10):
                    await again.wait()
                await bus.flush()

        asyncio.run(main())

    def test_closing_ours_ends_in_time(self, run_loop: RunLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(our_nats, "CLOSE_TIMEOUT", 0.2)

        async def main() -> None:
            async with Broker(port=0) as broker:
                bus = await connect_service(broker)
                os.kill(broker.pid, signal.SIGSTOP)
                try:
                    bus.publish("a", bytes(8_000_000))
                    async with asyncio.timeout(2):
                        await bus.close()
                finally:
                    os.kill(broker.pid, signal.SIGCONT)

        run_loop(main())

    @staticmethod
    async def publish_much(client: Client) -> None:
        for _ in range(64):
            await client.publish("much", bytes(1 << 20))
