"""The store on JetStream: a work queue, records of ended requests, and a stream whose sequence numbers the terms.

In a cluster each stream has a leader, and only the leader stores and reads. When the leader's server dies, the others
elect another one after 4 to 9 s, as nats-server has it. Meanwhile JetStream refuses or loses requests, so the store
sends them again: a request is idempotent, or has a message id.
"""

import asyncio
import secrets
import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import msgspec
from typing_extensions import override

from pagewire.shared import subjects
from pagewire.shared.bus.framing import STATUS
from pagewire.shared.bus.jetstream import (
    API,
    ELECTION_INTERVAL,
    NO_MESSAGE,
    NOT_NOW,
    LeaderSearch,
    NotNow,
)
from pagewire.shared.bus.protocol import (
    LIST_BATCH,
    Bus,
    Handler,
    Headers,
    Item,
    Message,
    QueueLengths,
    Store,
    StoredItem,
)
from pagewire.shared.bus.queue_consumers import QueueConsumers, durable_name
from pagewire.shared.bus.requests import Exchange, Requests
from pagewire.shared.bus.store_replies import (
    StreamInfo,
    StreamState,
    get_reply,
    put_reply,
    stream_info,
)
from pagewire.shared.bus.stream_keeper import StreamKeeper
from pagewire.shared.bus.streams import (
    CHECK_DONE,
    CHECK_SIZE,
    CHECK_WORK,
    DONE_STREAM,
    NANOSECONDS,
    STREAMS,
    TERM_STREAM,
    WORK_STREAM,
)
from pagewire.shared.errors import (
    ConfigurationError,
    ConnectionLost,
    NoResponders,
    RequestTimeout,
    StorageRefused,
)

TIMEOUT = 2.0
"""Seconds within which JetStream must answer a request."""
PUT_TIMEOUT = 5.0
"""Seconds within which a message is stored although the connection is lost, as when the broker restarts."""
ELECTION_TIMEOUT = 20.0
"""Seconds within which a message is stored in a cluster: by then a stream must have another leader."""
ELECTION_TIME = 10.0
"""Seconds within which a queue has another leader after the loss of a server."""
READ_TIMEOUT = 1.0
"""Seconds within which a record is read in a cluster. Readers try again, so this need not cover an election."""
RECONNECT_INTERVAL = 0.05
"""Seconds between two attempts to store after a lost connection."""
LIST_BYTES = 1 << 20
"""Bytes of items after which an answer of `list_work` ends."""
OWN_HEADERS = "Nats-"
"""Prefix of the headers that JetStream adds or obeys. All other headers belong to the item."""
SEQUENCE = "Nats-Sequence"
"""Header with the number of a stored message."""
MESSAGE_ID = "Nats-Msg-Id"
"""Header by which JetStream recognises a message that is sent again."""


class Connection(Bus, Protocol):
    """A bus on which the store can subscribe for the time of one pull."""

    def subscribed(self, subject: str, handler: Handler) -> AbstractContextManager[None]:
        """Delivers messages to `handler` inside the block."""


class NatsStore(Store):
    """The `Store` of one connection. All connections with the rights of a service share the same data."""

    def __init__(
        self, bus: Connection, requests: Requests, max_store: int, *, create_streams: bool, replicas: int = 1
    ) -> None:
        """`max_store` is the number of bytes of all streams together, `replicas` the number of copies of each."""
        self._create_streams = create_streams
        self._replicas = replicas
        self.election_time = 0.0 if replicas == 1 else ELECTION_TIME
        self._bus = bus
        self._streams = StreamKeeper(bus, max_store, replicas, self.now)
        self._requests = requests
        self._clock: float | None = None
        """The broker's Unix time less our monotonic time, in seconds; None: the clock has not been read."""
        self._consumers = QueueConsumers(bus, replicas, self._restore)
        self._leaders = LeaderSearch(bus, STREAMS, self._create_lost)

    async def prepare(self) -> None:
        """Creates or updates the streams; see `StreamKeeper.prepare`."""
        await self._streams.prepare()

    @override
    async def mend(self) -> list[str]:
        return await self._streams.mend()

    async def _create_lost(self) -> None:
        """Creates the streams of a cluster that has lost its disks, if this connection may."""
        if self._create_streams:
            await self._streams.restore()

    @override
    async def put_work(self, queue: str, data: bytes, *, headers: Headers | None = None) -> int:
        """Every attempt has one message id, so that JetStream stores the item once."""
        identified = {**(headers or {}), MESSAGE_ID: secrets.token_hex(8)}
        return await self._put(WORK_STREAM, f"{subjects.WORK}.{queue}", data, identified)

    @override
    def now(self) -> float:
        return time.time() if self._clock is None else self._clock + time.monotonic()

    @override
    async def read_clock(self) -> float:
        began = time.monotonic()
        info = await self._work_info({})
        if info.ts is not None:
            middle = (began + time.monotonic()) / 2  # the reply was written between the two
            self._clock = info.ts.timestamp() - middle
        return self.now() - time.time()

    @override
    async def check(self) -> None:
        """Stores an item and a record that nobody reads and that replace those of the check before."""
        await self._put(WORK_STREAM, CHECK_WORK, bytes(CHECK_SIZE), {"Nats-Rollup": "sub"})
        await self._put(DONE_STREAM, CHECK_DONE, bytes(CHECK_SIZE))

    @override
    async def pull_work(self, queue: str, count: int, *, expires: float) -> list[Item]:
        """The request waits at the server; without a connection it is sent after the reconnection."""
        items: list[Item] = []
        try:
            async with asyncio.timeout(expires + TIMEOUT):
                await self._bus.wait_connected()
                await self._consumers.create(queue)
                await self._pull(queue, count, expires, items)
        except (TimeoutError, RequestTimeout, ConnectionLost):
            return items
        except NoResponders:  # the streams are gone, or the consumer's leader
            self._consumers.forget(queue)
            if self._replicas == 1:
                await self._restore(f"{subjects.WORK}.{queue}")
            else:
                await asyncio.sleep(ELECTION_INTERVAL)
        except asyncio.CancelledError:
            for item in items:
                await self.return_work(item.ack)
            raise
        return items

    @override
    async def queue_lengths(self, prefix: str) -> QueueLengths:
        state = await self._work_state({"subjects_filter": f"{subjects.WORK}.{prefix}.>"})
        counts = state.subjects or {}
        lengths = {subject.removeprefix(f"{subjects.WORK}."): count for subject, count in counts.items()}
        left = self._streams.max_bytes(WORK_STREAM) - state.bytes
        return QueueLengths(lengths, state.last_seq, left)

    @override
    async def list_work(self, prefix: str, after: int = 0) -> list[StoredItem]:
        subject = f"{API}.DIRECT.GET.{WORK_STREAM}"
        request = {
            "seq": after + 1,
            "batch": LIST_BATCH,
            "max_bytes": LIST_BYTES,
            "next_by_subj": f"{subjects.WORK}.{prefix}.>",
        }
        answers = self._bus.request_many(subject, msgspec.json.encode(request), stall=TIMEOUT)
        return [
            StoredItem(int(message.headers[SEQUENCE]), message.data, _user_headers(message))
            async for message in answers
        ]

    @override
    async def missing_work(self, numbers: Collection[int]) -> set[int]:
        state = await self._work_state({"deleted_details": True})
        deleted = frozenset(state.deleted or ())
        return {n for n in numbers if not state.first_seq <= n <= state.last_seq or n in deleted}

    @override
    async def undelivered(self, queue: str) -> int:
        before = await self._consumers.info(queue)
        state = await self._work_state({"subjects_filter": f"{subjects.WORK}.{queue}"})
        items = sum((state.subjects or {}).values())
        if before.error is not None or before.paused:
            return items  # without a leader, and while it is paused, it delivers nothing, also nothing again
        after = await self._consumers.info(queue)
        if before != after:
            return 0  # it has just delivered
        return items if after.delivered.stream_seq > state.last_seq else items - after.num_ack_pending

    @override
    async def deliver_anew(self, queue: str) -> None:
        await self._consumers.delete(queue)

    async def _work_state(self, request: Mapping[str, object]) -> StreamState:
        """Returns the state of the work stream, with the details that a request asks for."""
        return (await self._work_info(request)).state

    async def _work_info(self, request: Mapping[str, object]) -> StreamInfo:
        """Returns what the broker knows of the work stream."""
        answer = await self._request(f"{API}.STREAM.INFO.{WORK_STREAM}", msgspec.json.encode(request))
        info = stream_info.decode(answer.data)
        if info.leaderless:
            raise NotNow(f"{WORK_STREAM} has no leader")
        return info

    @override
    async def renew_work(self, ack: str) -> None:
        self._bus.publish(ack, b"+WPI")

    @override
    async def end_work(self, ack: str) -> None:
        await self._bus.request(ack, b"+ACK", timeout=TIMEOUT)

    @override
    async def return_work(self, ack: str) -> None:
        self._bus.publish(ack, b"-NAK")

    @override
    async def put_done(self, request_id: str, data: bytes) -> None:
        await self._put(DONE_STREAM, f"{subjects.DONE}.{request_id}", data)

    @override
    async def get_done(self, request_id: str) -> bytes | None:
        """In a cluster the leader is asked, since the copies of the other servers may lag behind."""
        subject = f"{subjects.DONE}.{request_id}"
        if self._replicas == 1:
            message = await self._request(f"{API}.DIRECT.GET.{DONE_STREAM}.{subject}", b"")
            return None if STATUS in message.headers else message.data
        request = msgspec.json.encode({"last_by_subj": subject})
        reply = await self._bus.request(f"{API}.STREAM.MSG.GET.{DONE_STREAM}", request, timeout=READ_TIMEOUT)
        record = get_reply.decode(reply.data)
        if record.error is not None and record.error.err_code != NO_MESSAGE:
            raise StorageRefused(subject, record.error.description)
        return record.message.data if record.message is not None else None

    @override
    async def next_term(self) -> int:
        return await self._put(TERM_STREAM, subjects.TERM, b"")

    async def _pull(self, queue: str, count: int, expires: float, items: list[Item]) -> None:
        """Sends one pull request, which waits for the first item; appends to `items` until a status or `count`."""
        request = {"batch": count, "expires": int(expires * NANOSECONDS), "no_wait": True}
        subject = f"{API}.CONSUMER.MSG.NEXT.{WORK_STREAM}.{durable_name(queue)}"
        inbox = self._bus.new_inbox()  # an item keeps its own subject, so each pull needs a subscription of its own
        with Exchange(self._requests, subject) as exchange, self._bus.subscribed(inbox, self._receiver(exchange)):
            self._bus.publish(subject, msgspec.json.encode(request), reply=inbox)
            while len(items) < count:
                message = await exchange.next(expires + TIMEOUT)
                if STATUS in message.headers:
                    return
                items.append(_item(message))

    def _receiver(self, exchange: Exchange) -> Handler:
        """Returns the handler of a pull; it hands back an item that arrives after the pull has ended."""

        def receive(message: Message) -> None:
            if not exchange.closed:
                exchange.put(message)
            elif STATUS not in message.headers:
                self._bus.publish(message.reply, b"-NAK")

        return receive

    async def _put(self, stream: str, subject: str, data: bytes, headers: Headers | None = None) -> int:
        """Stores a message and returns its number.

        If the connection is lost before the answer, and in a cluster if the stream's leader is lost, it sends the
        message again.
        """
        timeout = PUT_TIMEOUT if self._replicas == 1 else ELECTION_TIMEOUT
        connected = False
        try:
            async with asyncio.timeout(timeout):
                while True:
                    await self._bus.wait_connected()
                    connected = True
                    began = asyncio.get_running_loop().time()
                    try:
                        return await self._publish(subject, data, headers)
                    except ConnectionLost:
                        connected = False
                    except (NoResponders, RequestTimeout, NotNow):
                        if self._replicas == 1:
                            raise
                        await self._leaders.find(stream, began)
                    await asyncio.sleep(RECONNECT_INTERVAL)
        except TimeoutError:
            if connected and self._replicas > 1:
                raise StorageRefused(subject, f"{stream} has no leader") from None
            raise ConnectionLost(f"there was no connection to store {subject} within {timeout:g} s") from None

    async def _publish(self, subject: str, data: bytes, headers: Headers | None = None) -> int:
        try:
            message = await self._request(subject, data, headers)
        except RequestTimeout:
            if self._replicas > 1:
                raise
            await self._wait_for_broker()
            message = await self._request(subject, data, headers)
        stored = put_reply.decode(message.data)
        if stored.error is not None:
            kind = NotNow if stored.error.err_code in NOT_NOW else partial(StorageRefused, subject)
            raise kind(stored.error.description)
        return stored.seq

    async def _wait_for_broker(self) -> None:
        """Waits for a broker that is silent because it is frozen, which says nothing about its store.

        Raises ConnectionLost if it stays silent. If the broker answers, only its JetStream was silent: it cannot write.
        """
        try:
            await self._bus.flush(timeout=TIMEOUT)
        except RequestTimeout as error:
            raise ConnectionLost(str(error)) from None

    async def _request(self, subject: str, data: bytes, headers: Headers | None = None) -> Message:
        """Sends a request; creates the streams again when the only server has lost its disk."""
        try:
            return await self._bus.request(subject, data, timeout=TIMEOUT, headers=headers)
        except NoResponders:
            if self._replicas > 1:
                raise
            await self._restore(subject)
            return await self._bus.request(subject, data, timeout=TIMEOUT, headers=headers)

    async def _restore(self, subject: str) -> None:
        """Creates the streams again; raises StorageRefused if that is impossible now."""
        if not self._create_streams:
            raise StorageRefused(subject, "JetStream does not answer, or the streams are not there yet")
        try:
            await self._streams.restore()
        except ConfigurationError as error:
            raise StorageRefused(subject, str(error)) from None


def _item(message: Message) -> Item:
    """Builds an item. Its ack subject ends in deliveries, stream and consumer sequence, nanoseconds and pending."""
    fields = message.reply.split(".")
    deliveries, number, _, stored_at = fields[4:8] if len(fields) == 9 else fields[6:10]
    headers = _user_headers(message)
    return Item(message.data, headers, message.reply, int(number), int(deliveries), int(stored_at) / NANOSECONDS)


def _user_headers(message: Message) -> Headers:
    """Returns the headers that the item was stored with."""
    return {name: value for name, value in message.headers.items() if not name.startswith(OWN_HEADERS)}
