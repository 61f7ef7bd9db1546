"""The rules of every bus: one suite for the in-memory bus, a real NATS server, and the store of a cluster."""

import asyncio
import itertools
import secrets
import time
from functools import partial

import pytest

from pagewire.shared.bus import Bus, Handler, Item, Message, StoredItem, nats, requests
from pagewire.shared.bus.memory import MemoryBus
from pagewire.shared.errors import BusUnavailable, ConnectionLost, MessageTooLarge, NoResponders, RequestTimeout
from tests.shared.bus.conftest import KINDS, World
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend(kind: str) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": kind == "nats-on-uvloop"}


def unique(name: str) -> str:
    """A subject token that no other test uses."""
    return f"{name}-{secrets.token_hex(4)}"


def collect(into: list[bytes]) -> Handler:
    """A handler that keeps what it gets."""
    return lambda message: into.append(message.data)


async def end_by_another(bus: Bus, item: Item) -> None:
    """Ends an item that another connection has just pulled: its server may learn of a new consumer a moment later."""
    while True:
        try:
            return await bus.store.end_work(item.ack)
        except NoResponders:
            await asyncio.sleep(0.01)


class TestSubjects:
    @pytest.mark.parametrize(
        ("pattern", "hits", "misses"),
        [
            ("a.b", ["a.b"], ["a", "a.c", "a.b.c", "A.b"]),
            ("a.*", ["a.b", "a.c"], ["a", "a.b.c", "b.a"]),
            ("*.b", ["a.b"], ["b", "a.b.c"]),
            ("a.*.c", ["a.b.c"], ["a.c", "a.b.d", "a.b.c.d"]),
            ("a.>", ["a.b", "a.b.c"], ["a", "b.a"]),
            ("*.>", ["a.b", "b.a.c"], ["a"]),
        ],
    )
    async def test_wildcards_match_one_token_or_the_rest(
        self, world: World, pattern: str, hits: list[str], misses: list[str]
    ) -> None:
        publisher, subscriber = await world.connect(), await world.connect()
        root = unique("t")
        received: list[str] = []
        await subscriber.subscribe(f"{root}.{pattern}", lambda message: received.append(message.subject))
        await subscriber.subscribe(f"{root}.end", lambda message: received.append("end"))
        for subject in [*hits, *misses]:
            publisher.publish(f"{root}.{subject}", b"")
        await publisher.flush()
        await subscriber.flush()
        await until(lambda: len(received) >= len(hits))
        assert received == [f"{root}.{subject}" for subject in hits]

    @pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB x", "a.*", "a.>", "\u00e9"])
    async def test_an_invalid_subject_is_refused(self, world: World, subject: str) -> None:
        bus = await world.connect()
        with pytest.raises(ValueError, match="not a subject"):
            bus.publish(subject, b"")
        with pytest.raises(ValueError, match="not a subject"):
            await bus.request(subject, b"", timeout=1)
        await bus.flush()

    @pytest.mark.parametrize("pattern", ["", "a..b", "a.>.b", "a.b*", ".a", "a.", "a b"])
    async def test_an_invalid_pattern_is_refused(self, world: World, pattern: str) -> None:
        bus = await world.connect()
        with pytest.raises(ValueError, match="not a subject"):
            await bus.subscribe(pattern, lambda message: None)
        await bus.flush()

    async def test_inboxes_differ_and_carry_the_prefix(self, world: World) -> None:
        one, two = await world.connect(), await world.connect()
        inboxes = {bus.new_inbox() for bus in (one, two) for _ in range(100)}
        assert len(inboxes) == 200
        assert all(inbox.startswith("_SVC.") for inbox in inboxes)


class TestViews:
    """A view is a bus over the same connection with inboxes of its own."""

    async def test_requests_of_a_view_are_answered_under_its_prefix(self, world: World) -> None:
        bus, other = await world.connect(), await world.connect()
        subject, prefix = unique("t"), f"_TENANT.{unique('a')}"
        requests: list[Message] = []

        def answer(message: Message) -> None:
            requests.append(message)
            other.publish(message.reply, b"answer")

        await other.subscribe(subject, answer)
        view = await bus.view(prefix)
        assert (await view.request(subject, b"", timeout=5)).data == b"answer"
        assert (await bus.request(subject, b"", timeout=5)).data == b"answer"
        with view.inbox(lambda message: None) as inbox:
            assert inbox.startswith(f"{prefix}.")
        assert view.new_inbox().startswith(f"{prefix}.")
        assert [message.reply.startswith(f"{prefix}.") for message in requests] == [True, False]

    async def test_a_views_request_without_a_subscriber_fails_at_once(self, world: World) -> None:
        view = await (await world.connect()).view("_TENANT.a")
        with pytest.raises(NoResponders):
            await view.request(unique("t"), b"", timeout=30)

    async def test_a_view_ends_with_its_connection(self, world: World) -> None:
        bus = await world.connect()
        view = await bus.view("_TENANT.a")
        subject = unique("t")
        arrived = asyncio.Event()
        await bus.subscribe(subject, lambda message: arrived.set())
        await view.close()
        waiting = asyncio.create_task(view.request(subject, b"", timeout=30))
        await arrived.wait()
        await bus.close()
        with pytest.raises(BusUnavailable):
            await waiting


class TestDelivery:
    async def test_subject_data_reply_and_headers_arrive(self, world: World) -> None:
        bus = await world.connect()
        subject = unique("t")
        received: list[Message] = []
        await bus.subscribe(subject, received.append)
        bus.publish(subject, b"\x00\r\n\xff", reply="r.s", headers={"One": "1", "two": "\u00fc:x"})
        bus.publish(subject, b"")
        await until(lambda: len(received) == 2)
        assert received == [
            Message(subject, b"\x00\r\n\xff", "r.s", {"One": "1", "two": "\u00fc:x"}),
            Message(subject, b""),
        ]

    async def test_a_line_break_in_a_header_becomes_a_space(self, world: World) -> None:
        bus = await world.connect()
        subject = unique("t")
        received: list[Message] = []
        await bus.subscribe(subject, received.append)
        bus.publish(subject, b"x", headers={"Error": "one\r\nPUB two"})
        with pytest.raises(ValueError, match="header name"):
            bus.publish(subject, b"x", headers={"a: b\r\n": "c"})
        await until(lambda: received)
        assert set(received[0].headers) == {"Error"}

    async def test_messages_of_one_publisher_keep_their_order(self, world: World) -> None:
        """Also across the subjects of one subscription."""
        publisher, subscriber = await world.connect(), await world.connect()
        root = unique("t")
        received: list[int] = []
        await subscriber.subscribe(f"{root}.*", lambda message: received.append(int(message.data)))
        for number in range(20_000):
            publisher.publish(f"{root}.{number % 7}", b"%d" % number)
            if number % 1000 == 0:
                await publisher.flush()
        await until(lambda: len(received) == 20_000)
        assert received == list(range(20_000))

    async def test_a_handler_is_never_called_from_within_publish(self, world: World) -> None:
        bus = await world.connect()
        subject = unique("t")
        depth = deepest = calls = 0

        def handler(message: Message) -> None:
            nonlocal depth, deepest, calls
            depth += 1
            calls += 1
            deepest = max(deepest, depth)
            if calls < 5:
                bus.publish(subject, b"")
            depth -= 1

        await bus.subscribe(subject, handler)
        bus.publish(subject, b"")
        assert calls == 0
        await until(lambda: calls == 5)
        assert deepest == 1

    async def test_each_message_goes_to_one_of_a_queue_group_and_to_every_other(self, world: World) -> None:
        publisher = await world.connect()
        members = [await world.connect() for _ in range(3)]
        subject = unique("t")
        shared_by: list[list[bytes]] = [[], [], []]
        everything: list[bytes] = []
        other_group: list[bytes] = []
        for member, received in zip(members, shared_by, strict=True):
            await member.subscribe(subject, collect(received), queue="q")
        await members[0].subscribe(subject, lambda message: other_group.append(message.data), queue="other")
        await members[1].subscribe(subject, lambda message: everything.append(message.data))
        expected = [b"%d" % number for number in range(300)]
        for data in expected:
            publisher.publish(subject, data)
        await until(lambda: len(everything) == len(other_group) == sum(map(len, shared_by)) == 300)
        assert everything == other_group == expected
        assert sorted(itertools.chain(*shared_by), key=int) == expected
        assert all(shared_by), "one member got nothing of 300 messages"

    async def test_a_subscription_holds_when_subscribe_returns(self, world: World) -> None:
        """Every message that is published after `subscribe` has returned is delivered."""
        publisher, subscriber = await world.connect(), await world.connect()
        root = unique("t")
        received: list[str] = []
        for number in range(300):
            subject = f"{root}.{number}"
            subscription = await subscriber.subscribe(subject, lambda message: received.append(message.subject))
            publisher.publish(subject, b"")
            await publisher.flush()
            await subscriber.flush()
            await subscription.unsubscribe()
        assert received == [f"{root}.{number}" for number in range(300)]

    @pytest.mark.parametrize("error", [ValueError("bad"), asyncio.CancelledError()])
    async def test_a_subscription_survives_an_exception_of_its_handler(
        self, world: World, error: BaseException
    ) -> None:
        bus = await world.connect()
        subject = unique("t")
        received: list[bytes] = []

        def handler(message: Message) -> None:
            received.append(message.data)
            if message.data == b"bad":
                raise error

        await bus.subscribe(subject, handler)
        for data in (b"bad", b"good", b"bad", b"good"):
            bus.publish(subject, data)
        await until(lambda: len(received) == 4)
        await bus.subscribe(f"{subject}.echo", lambda message: bus.publish(message.reply, message.data))
        assert (await bus.request(f"{subject}.echo", b"alive", timeout=30)).data == b"alive"


class TestEnd:
    async def test_unsubscribe_loses_nothing_of_a_queue_group(self, world: World) -> None:
        """Members come and go under traffic; each message is still seen once."""
        publisher, first, second = await world.connect(), await world.connect(), await world.connect()
        subject = unique("t")
        received: list[int] = []
        sent = 0

        def take(message: Message) -> None:
            received.append(int(message.data))

        async def send() -> None:
            nonlocal sent
            while True:
                for _ in range(50):
                    publisher.publish(subject, b"%d" % sent)
                    sent += 1
                await publisher.flush()

        def more_than(count: int) -> bool:
            return sent > count

        await first.subscribe(subject, take, queue="q")
        sending = asyncio.create_task(send())
        for _ in range(25):
            subscription = await second.subscribe(subject, take, queue="q")
            await until(partial(more_than, sent + 100))
            await subscription.unsubscribe()
        sending.cancel()
        await asyncio.wait({sending})
        await until(lambda: len(received) >= sent)
        assert sorted(received) == list(range(sent))

    async def test_nothing_is_delivered_after_unsubscribe(self, world: World) -> None:
        bus = await world.connect()
        subject = unique("t")
        received: list[bytes] = []
        subscription = await bus.subscribe(subject, lambda message: received.append(message.data))
        bus.publish(subject, b"before")
        await subscription.unsubscribe()
        assert received == [b"before"]
        bus.publish(subject, b"after")
        await bus.flush()
        assert received == [b"before"]
        await subscription.unsubscribe()

    async def test_close_delivers_arrived_messages_and_writes_published_ones(self, world: World) -> None:
        reader, closing = await world.connect(), await world.connect()
        subject = unique("t")
        received: list[bytes] = []
        answers: list[bytes] = []
        await closing.subscribe(subject, lambda message: received.append(message.data))
        await closing.subscribe(subject, lambda message: closing.publish(f"{subject}.answer", message.data))
        await reader.subscribe(f"{subject}.answer", lambda message: answers.append(message.data))
        expected = [b"%d" % number for number in range(1000)]
        for data in expected:
            reader.publish(subject, data)
        await reader.flush()
        await closing.close()
        assert received == expected
        await until(lambda: len(answers) == 1000)
        assert answers == expected

    async def test_a_closed_bus_raises_an_error(self, world: World) -> None:
        bus = await world.connect()
        other = await world.connect()
        subject = unique("t")
        await other.subscribe(subject, lambda message: None)
        waiting = asyncio.create_task(bus.request(subject, b"", timeout=30))
        await asyncio.sleep(0)
        await asyncio.gather(bus.close(), bus.close())
        await bus.close()
        assert not bus.connected
        with pytest.raises(BusUnavailable):
            await waiting
        with pytest.raises(BusUnavailable):
            bus.publish(subject, b"")
        with pytest.raises(BusUnavailable):
            await bus.request(subject, b"", timeout=1)
        with pytest.raises(BusUnavailable):
            await bus.subscribe(subject, lambda message: None)
        with pytest.raises(BusUnavailable):
            await bus.flush()


class TestInboxes:
    async def test_each_inbox_gets_its_own_messages_until_it_is_closed(self, world: World) -> None:
        bus, service = await world.connect(), await world.connect()
        first: list[bytes] = []
        second: list[bytes] = []
        with bus.inbox(lambda message: second.append(message.data)) as kept:
            with bus.inbox(lambda message: first.append(message.data)) as closed:
                assert closed != kept
                for number in range(50):
                    service.publish(closed, b"%d" % number)
                    service.publish(kept, b"%d" % number)
                await until(lambda: len(second) == 50)
                assert first == second == [b"%d" % number for number in range(50)]
            service.publish(closed, b"late")
            service.publish(kept, b"last")
            await until(lambda: second[-1] == b"last")
        assert len(first) == 50

    async def test_an_inbox_gets_status_503_without_a_subscriber(self, world: World) -> None:
        bus = await world.connect()
        received: list[Message] = []
        with bus.inbox(received.append) as inbox:
            bus.publish(unique("t"), b"", reply=inbox)
            await until(lambda: received)
        assert received[0].headers["Status"] == "503"

    async def test_an_inbox_needs_a_connection(self, world: World) -> None:
        bus = await world.connect()
        await bus.close()
        with pytest.raises(ConnectionLost), bus.inbox(lambda _: None):
            pass


class TestRequests:
    async def test_each_request_gets_its_own_reply(self, world: World) -> None:
        client, service = await world.connect(), await world.connect()
        subject = unique("t")
        await service.subscribe(
            subject, lambda message: service.publish(message.reply, message.data, headers={"Seen": "yes"})
        )
        replies = await asyncio.gather(
            *(client.request(subject, b"%d" % number, timeout=5, headers={"N": "1"}) for number in range(500))
        )
        assert [reply.data for reply in replies] == [b"%d" % number for number in range(500)]
        assert replies[0].headers == {"Seen": "yes"}

    async def test_a_request_without_a_subscriber_fails_at_once(self, world: World) -> None:
        bus = await world.connect()
        with pytest.raises(NoResponders):
            await bus.request(unique("t"), b"", timeout=PATIENCE)
        with pytest.raises(NoResponders):
            await anext(bus.request_many(unique("t"), b"", stall=PATIENCE))

    async def test_a_reply_subject_gets_status_503_without_a_subscriber(self, world: World) -> None:
        """So a publisher finds out that its reader is gone, without waiting."""
        bus, other = await world.connect(), await world.connect()
        inbox = bus.new_inbox()
        received: list[Message] = []
        others: list[Message] = []
        await bus.subscribe(inbox, received.append)
        await other.subscribe(inbox, others.append)
        bus.publish(unique("t"), b"frame", reply=inbox)
        await until(lambda: received)
        await other.flush()
        assert (received[0].data, received[0].headers["Status"]) == (b"", "503")
        assert not others, "only the publisher gets the status"

    async def test_an_unanswered_request_times_out(self, world: World) -> None:
        bus = await world.connect()
        subject = unique("t")
        requests: list[Message] = []
        await bus.subscribe(subject, requests.append)
        with pytest.raises(RequestTimeout):
            await bus.request(subject, b"", timeout=0.05)
        bus.publish(requests[0].reply, b"too late")
        await bus.subscribe(subject + ".echo", lambda message: bus.publish(message.reply, b"in time"))
        assert (await bus.request(subject + ".echo", b"", timeout=30)).data == b"in time"

    async def test_a_reply_counts_that_arrived_while_the_loop_stood_still(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The loop sees that the time is over before it reads the reply."""
        monkeypatch.setattr(requests, "LAST_LOOK", PATIENCE)
        monkeypatch.setattr(nats, "LAST_LOOK", PATIENCE)
        client, service = await world.connect(), await world.connect()
        subject = unique("t")

        def stand_still() -> None:
            time.sleep(0.05)

        def answer(message: Message) -> None:
            stand_still()
            service.publish(message.reply, b"yes")

        await service.subscribe(subject, answer)
        assert (await client.request(subject, b"", timeout=0.01)).data == b"yes"
        flushed = asyncio.create_task(client.flush(timeout=0.01))
        await asyncio.sleep(0)
        stand_still()
        await flushed

    async def test_many_replies_end_with_an_empty_one(self, world: World) -> None:
        client, service = await world.connect(), await world.connect()
        subject = unique("t")

        def stream(message: Message) -> None:
            for number in range(100):
                service.publish(message.reply, message.data + b"%d" % number)
            service.publish(message.reply, b"")

        await service.subscribe(subject, stream)

        async def read(name: bytes) -> list[bytes]:
            return [message.data async for message in client.request_many(subject, name, stall=5)]

        streams = await asyncio.gather(read(b"a"), read(b"b"), read(b"c"))
        assert list(streams) == [[name + b"%d" % number for number in range(100)] for name in (b"a", b"b", b"c")]

    async def test_a_silent_stream_of_replies_times_out(self, world: World) -> None:
        bus = await world.connect()
        subject = unique("t")
        await bus.subscribe(subject, lambda message: bus.publish(message.reply, b"one"))
        stream = bus.request_many(subject, b"", stall=0.1)
        assert (await anext(stream)).data == b"one"
        with pytest.raises(RequestTimeout):
            await anext(stream)


class TestSize:
    async def test_header_and_payload_count_together(self, world: World) -> None:
        bus = await world.connect()
        subject = unique("t")
        sizes: list[int] = []
        await bus.subscribe(subject, lambda message: sizes.append(len(message.data)))
        headers = {"Name": "value"}
        overhead = len("NATS/1.0\r\nName: value\r\n\r\n")
        full = bytes(bus.max_payload)
        bus.publish(subject, full)
        with pytest.raises(MessageTooLarge):
            bus.publish(subject, full + b"x")
        bus.publish(subject, full[overhead:], headers=headers)
        with pytest.raises(MessageTooLarge) as refused:
            bus.publish(subject, full[overhead - 1 :], headers=headers)
        assert (refused.value.size, refused.value.limit) == (bus.max_payload + 1, bus.max_payload)
        with pytest.raises(MessageTooLarge):
            await bus.request(subject, full, timeout=5, headers=headers)
        with pytest.raises(MessageTooLarge):
            await bus.store.put_work(unique("m"), full, headers=headers)
        await until(lambda: len(sizes) == 2)
        assert sizes == [bus.max_payload, bus.max_payload - overhead]
        assert bus.connected


@pytest.mark.parametrize("kind", [*KINDS, "cluster"], indirect=True)
class TestStore:
    async def test_an_item_is_delivered_as_it_was_put(self, world: World) -> None:
        tokenizer, scheduler, detokenizer = [await world.connect() for _ in range(3)]
        model = unique("m")
        await tokenizer.store.put_work(model, b"data", headers={"traceparent": "00-1-2-01"})
        (item,) = await scheduler.store.pull_work(model, 10, expires=5)
        assert (item.data, dict(item.headers)) == (b"data", {"traceparent": "00-1-2-01"})
        assert item.deliveries == 1
        assert item.stored_at > 1_700_000_000
        await end_by_another(detokenizer, item)
        await detokenizer.store.end_work(item.ack)
        assert await scheduler.store.pull_work(model, 10, expires=0.05) == []

    async def test_items_come_in_order_and_once_among_several_pullers(self, world: World) -> None:
        one, two = await world.connect(), await world.connect()
        model, other = unique("m"), unique("m")
        for number in range(20):
            await one.store.put_work(model, b"%d" % number)
        await one.store.put_work(other, b"of another model")
        first = await one.store.pull_work(model, 5, expires=5)
        rest = await two.store.pull_work(model, 100, expires=5)
        assert [item.data for item in first + rest] == [b"%d" % number for number in range(20)]
        for item in first + rest:
            await two.store.end_work(item.ack)

    async def test_queues_of_one_prefix_are_apart_and_tell_how_many_items_they_hold(self, world: World) -> None:
        one, two = await world.connect(), await world.connect()
        model, longer = unique("m"), unique("m")
        queues = [f"{model}.urgent.any", f"{model}.normal.any", f"{model}.normal.replica-1"]
        assert (await one.store.queue_lengths(model)).items == {}
        numbers = [await one.store.put_work(queue, queue.encode()) for queue in queues]
        assert numbers == sorted(set(numbers))
        last = await one.store.put_work(f"{longer}.normal.any", b"of another model")
        lengths = await two.store.queue_lengths(model)
        assert (lengths.items, lengths.last) == (dict.fromkeys(queues, 1), last)
        for queue in queues:
            (item,) = await two.store.pull_work(queue, 10, expires=5)
            assert item.data == queue.encode()
            assert queue in (await one.store.queue_lengths(model)).items, "a delivered item is not gone"
            await one.store.end_work(item.ack)
            async with asyncio.timeout(PATIENCE):
                while queue in (await one.store.queue_lengths(model)).items:
                    pass  # a cluster removes the item after it has confirmed its end

    async def test_items_are_listed_without_being_delivered(self, world: World) -> None:
        one, two = await world.connect(), await world.connect()
        model = unique("m")
        bodies = [b"%d" % number * (number % 3 * 10_000 + 1) for number in range(250)]
        for number, body in enumerate(bodies):
            queue = f"{model}.{'normal' if number % 2 else 'urgent'}.any"
            await one.store.put_work(queue, body, headers={"trace": str(number)})
        await one.store.put_work(f"{unique('m')}.normal.any", b"of another model")
        (taken,) = await two.store.pull_work(f"{model}.urgent.any", 1, expires=5)
        listed: list[StoredItem] = []
        while items := await one.store.list_work(model, listed[-1].sequence if listed else 0):
            listed += items
        assert [item.data for item in listed] == bodies, "a delivered item is among them"
        assert [item.headers for item in listed] == [{"trace": str(number)} for number in range(250)]
        assert sorted({item.sequence for item in listed}) == [item.sequence for item in listed]
        await two.store.end_work(taken.ack)
        async with asyncio.timeout(PATIENCE):
            while (await one.store.list_work(model))[0].data != bodies[1]:
                pass  # a copy of a cluster may lag behind
        assert await one.store.list_work(model, listed[-1].sequence) == []
        for queue, count in ((f"{model}.urgent.any", 124), (f"{model}.normal.any", 125)):
            pulled = await two.store.pull_work(queue, count, expires=5)
            assert len(pulled) == count, "nothing that was listed counts as delivered"
            assert all(item.deliveries == 1 for item in pulled)

    async def test_the_stores_time_is_the_brokers(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        bus = await world.connect()
        right = time.time()
        assert abs(bus.store.now() - right) < 60, "our own clock, until the broker's has been read"
        await bus.store.put_work(f"{unique('m')}.normal.any", b"x")  # so that the streams are there
        assert abs(await bus.store.read_clock()) < 60
        if not isinstance(bus, MemoryBus):  # which is in this process
            ours = time.time
            monkeypatch.setattr(time, "time", lambda: ours() + 600)
            assert abs(bus.store.now() - right) < 60
            assert -660 < await bus.store.read_clock() < -540

    async def test_items_that_have_vanished_are_missing(self, world: World) -> None:
        one, two = await world.connect(), await world.connect()
        queue = f"{unique('m')}.normal.any"
        numbers = [await one.store.put_work(queue, b"%d" % number) for number in range(5)]
        assert await two.store.missing_work(numbers) == set()
        taken = await two.store.pull_work(queue, 4, expires=5)
        assert await one.store.missing_work(numbers) == set(), "a delivered item is not gone"
        for item in (taken[0], taken[2]):
            await two.store.end_work(item.ack)
        async with asyncio.timeout(PATIENCE):
            while await one.store.missing_work(numbers) != {numbers[0], numbers[2]}:
                pass  # a cluster removes an item after it has confirmed its end
        assert await one.store.missing_work([numbers[4], numbers[4] + 1000]) == {numbers[4] + 1000}

    async def test_a_queue_counts_undelivered_items_and_delivers_them_anew(self, world: World) -> None:
        one, two = await world.connect(), await world.connect()
        queue = f"{unique('m')}.normal.any"
        for number in range(3):
            await one.store.put_work(queue, b"%d" % number)
        taken = await two.store.pull_work(queue, 2, expires=5)
        assert await one.store.undelivered(queue) == 1
        await two.store.end_work(taken[0].ack)
        async with asyncio.timeout(PATIENCE):
            while await one.store.undelivered(queue) != 1:
                pass  # a cluster removes an item after it has confirmed its end
        await one.store.deliver_anew(queue)
        again: list[Item] = []
        while len(again) < 2:
            again += await two.store.pull_work(queue, 3, expires=1)
        assert [item.data for item in again] == [b"1", b"2"]
        assert await one.store.undelivered(queue) == 0

    async def test_a_pull_waits_for_the_first_item_only(self, world: World) -> None:
        putter, puller = await world.connect(), await world.connect()
        model = unique("m")
        assert await puller.store.pull_work(model, 10, expires=0.05) == []
        pulling = asyncio.create_task(puller.store.pull_work(model, 10, expires=2 * PATIENCE))
        await putter.store.put_work(model, b"one")
        async with asyncio.timeout(PATIENCE):
            (item,) = await pulling
        assert item.data == b"one"
        await puller.store.end_work(item.ack)

    async def test_a_cancelled_pull_loses_no_item(self, world: World) -> None:
        bus = await world.connect()
        model = unique("m")
        await bus.store.pull_work(model, 1, expires=0.05)
        for _ in range(20):
            pulling = asyncio.create_task(bus.store.pull_work(model, 1, expires=30))
            putting = asyncio.create_task(bus.store.put_work(model, b"x"))
            await asyncio.sleep(0)
            pulling.cancel()
            await asyncio.wait({pulling, putting})
            items = [] if pulling.cancelled() else pulling.result()
            loop = asyncio.get_running_loop()
            started = loop.time()
            items = items or await bus.store.pull_work(model, 1, expires=5)
            assert loop.time() - started < world.ack_wait * 0.9, "it came with the redelivery only"
            await bus.store.end_work(items[0].ack)

    async def test_an_item_is_redelivered_until_it_is_ended(self, world: World) -> None:
        owner, thief = await world.connect(), await world.connect()
        model = unique("m")
        for name in (b"lost", b"renewed", b"ended", b"returned"):
            await owner.store.put_work(model, name)
        lost, renewed, ended, returned = await owner.store.pull_work(model, 4, expires=5)
        loop = asyncio.get_running_loop()
        started = loop.time()
        await owner.store.end_work(ended.ack)
        await owner.store.return_work(returned.ack)
        (again,) = await thief.store.pull_work(model, 4, expires=5)
        assert (again.data, again.deliveries) == (b"returned", 2)
        assert loop.time() - started < world.ack_wait * 0.9, "returned items come again at once"
        await thief.store.end_work(again.ack)
        came: list[tuple[bytes, int]] = []
        while loop.time() - started < world.ack_wait * 1.6:
            await owner.store.renew_work(renewed.ack)
            for item in await thief.store.pull_work(model, 4, expires=world.ack_wait / 8):
                came.append((item.data, item.deliveries))
                assert loop.time() - started > world.ack_wait * 0.9
                await thief.store.end_work(item.ack)
        assert came == [(b"lost", 2)]
        await owner.store.end_work(renewed.ack)
        assert lost.ack != renewed.ack

    async def test_more_than_a_thousand_items_may_be_delivered_at_once(self, world: World) -> None:
        bus = await world.connect()
        model = unique("m")
        for start in range(0, 1200, 100):
            await asyncio.gather(*(bus.store.put_work(model, b"%d" % (start + n)) for n in range(100)))
        delivered: set[bytes] = set()
        while len(delivered) < 1200:
            items = await bus.store.pull_work(model, 200, expires=0.2)
            assert items, f"the queue holds back after {len(delivered)} items"
            delivered |= {item.data for item in items}
        assert len(delivered) == 1200

    async def test_the_record_of_an_ended_request_is_kept(self, world: World) -> None:
        one, two = await world.connect(), await world.connect()
        request_id = unique("request")
        assert await two.store.get_done(request_id) is None
        await one.store.put_done(request_id, b"first")
        await one.store.put_done(request_id, b"second")
        await one.store.put_done(unique("request"), b"other")
        assert await two.store.get_done(request_id) == b"second"

    async def test_terms_only_grow(self, world: World) -> None:
        buses = [await world.connect() for _ in range(3)]
        terms = [await bus.store.next_term() for bus in buses * 3]
        assert terms == sorted(set(terms))
        together = await asyncio.gather(*(bus.store.next_term() for bus in buses * 3))
        assert len(set(together)) == 9
        assert min(together) > max(terms)
