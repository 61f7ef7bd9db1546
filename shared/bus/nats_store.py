"""The store on JetStream: a work queue, the records of what ended, and a stream whose sequence counts the terms."""

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from pagewire.shared import subjects
from pagewire.shared.bus.framing import STATUS
from pagewire.shared.bus.protocol import ACK_WAIT, DONE_AGE, Handler, Headers, Item, Message
from pagewire.shared.bus.requests import Exchange, Requests
from pagewire.shared.errors import BusUnavailable, ConfigurationError, ConnectionLost, NoResponders, RequestTimeout

if TYPE_CHECKING:
    from pagewire.shared.bus.nats import NatsBus

API = "$JS.API"
WORK_STREAM = "PAGEWIRE_WORK"
DONE_STREAM = "PAGEWIRE_DONE"
TERM_STREAM = "PAGEWIRE_TERM"
WORK_LIMIT = 100_000
"""Items in the queue; past it, storing fails instead of filling the disk."""
FORGET_AFTER = 3600.0
"""Seconds without a pull after which the server forgets how far a queue was delivered. Its items stay."""
TIMEOUT = 2.0
"""Seconds for one answer of JetStream."""

NANOSECONDS = 1_000_000_000

_STREAMS: dict[str, dict[str, Any]] = {
    WORK_STREAM: {
        "subjects": [f"{subjects.WORK}.>"],
        "retention": "workqueue",
        "discard": "new",
        "max_msgs": WORK_LIMIT,
    },
    DONE_STREAM: {
        "subjects": [f"{subjects.DONE}.*"],
        "max_age": int(DONE_AGE * NANOSECONDS),
        "max_msgs_per_subject": 1,
        "allow_direct": True,
    },
    TERM_STREAM: {"subjects": [subjects.TERM], "max_msgs": 1},
}


class _Failure(msgspec.Struct):
    """Why JetStream declined."""

    description: str


class _Answer(msgspec.Struct):
    """What this module reads in an answer of JetStream's API."""

    error: _Failure | None = None


class _Stored(_Answer):
    """The acknowledgement of a stored message."""

    seq: int = 0


class _StreamState(msgspec.Struct):
    """What a stream holds."""

    subjects: dict[str, int] | None = None
    """Messages by subject."""


class _StreamInfo(_Answer):
    """The answer to a question for one."""

    state: _StreamState = msgspec.field(default_factory=_StreamState)


_answer = msgspec.json.Decoder(_Answer)
_stored = msgspec.json.Decoder(_Stored)
_info = msgspec.json.Decoder(_StreamInfo)


class NatsStore:
    """The `Store` of one connection. Every connection with the rights of a service sees the same one."""

    def __init__(self, bus: "NatsBus", requests: Requests) -> None:
        self._bus = bus
        self._requests = requests
        self._consumers: set[str] = set()

    async def prepare(self) -> None:
        """Creates the streams; any number of services may do so at the same time.

        Raises:
            ConfigurationError: the server has no JetStream, or streams of another make.
            BusUnavailable, RequestTimeout, NotPermitted
        """
        for name, config in _STREAMS.items():
            await self._create(f"STREAM.CREATE.{name}", {"name": name, "storage": "file", **config})

    async def put_work(self, queue: str, data: bytes, *, headers: Headers | None = None) -> None:
        """See `Store`."""
        await self._put(f"{subjects.WORK}.{queue}", data, headers)

    async def pull_work(self, queue: str, count: int, *, expires: float) -> list[Item]:
        """See `Store`. The request waits at the server; without a connection this waits for the next one."""
        items: list[Item] = []
        try:
            async with asyncio.timeout(expires + TIMEOUT):
                await self._bus.wait_connected()
                await self._prepare_consumer(queue)
                await self._pull(queue, count, expires, items)
        except (TimeoutError, RequestTimeout, ConnectionLost):
            return items
        except NoResponders:
            self._consumers.clear()
            await self.prepare()
        except asyncio.CancelledError:
            for item in items:
                await self.return_work(item.ack)
            raise
        return items

    async def stocked(self, prefix: str) -> list[str]:
        """See `Store`."""
        wish = msgspec.json.encode({"subjects_filter": f"{subjects.WORK}.{prefix}.>"})
        info = _info.decode((await self._ask(f"{API}.STREAM.INFO.{WORK_STREAM}", wish)).data)
        return sorted(subject.removeprefix(f"{subjects.WORK}.") for subject in info.state.subjects or ())

    async def renew_work(self, ack: str) -> None:
        """See `Store`."""
        self._bus.publish(ack, b"+WPI")

    async def end_work(self, ack: str) -> None:
        """See `Store`."""
        await self._bus.request(ack, b"+ACK", timeout=TIMEOUT)

    async def return_work(self, ack: str) -> None:
        """See `Store`."""
        self._bus.publish(ack, b"-NAK")

    async def put_done(self, request_id: str, data: bytes) -> None:
        """See `Store`."""
        await self._put(f"{subjects.DONE}.{request_id}", data)

    async def get_done(self, request_id: str) -> bytes | None:
        """See `Store`."""
        message = await self._ask(f"{API}.DIRECT.GET.{DONE_STREAM}.{subjects.DONE}.{request_id}", b"")
        return None if STATUS in message.headers else message.data

    async def next_term(self) -> int:
        """See `Store`."""
        return await self._put(subjects.TERM, b"")

    async def _pull(self, queue: str, count: int, expires: float, items: list[Item]) -> None:
        """One pull request: it waits for the first item, takes what there is, and ends with a status or when full."""
        wish = {"batch": count, "expires": int(expires * NANOSECONDS), "no_wait": True}
        subject = f"{API}.CONSUMER.MSG.NEXT.{WORK_STREAM}.{_durable(queue)}"
        inbox = self._bus.new_inbox()  # items keep their own subjects: only a subscription tells whose they are
        with Exchange(self._requests, subject) as exchange, self._bus.listening(inbox, self._receiver(exchange)):
            self._bus.publish(subject, msgspec.json.encode(wish), reply=inbox)
            while len(items) < count:
                message = await exchange.next(expires + TIMEOUT)
                if STATUS in message.headers:
                    return
                items.append(_item(message))

    def _receiver(self, exchange: Exchange) -> Handler:
        """Takes in what a pull brings; an item that comes when the pull was given up is for the next one at once."""

        def receive(message: Message) -> None:
            if not exchange.closed:
                exchange.put(message)
            elif STATUS not in message.headers:
                self._bus.publish(message.reply, b"-NAK")

        return receive

    async def _prepare_consumer(self, queue: str) -> None:
        if queue in self._consumers:
            return
        subject, durable = f"{subjects.WORK}.{queue}", _durable(queue)
        config = {
            "durable_name": durable,
            "filter_subject": subject,
            "ack_policy": "explicit",
            "ack_wait": int(ACK_WAIT * NANOSECONDS),
            "max_ack_pending": -1,
            "max_deliver": -1,
            "inactive_threshold": int(FORGET_AFTER * NANOSECONDS),
        }
        await self._create(
            f"CONSUMER.CREATE.{WORK_STREAM}.{durable}.{subject}", {"stream_name": WORK_STREAM, "config": config}
        )
        self._consumers.add(queue)

    async def _create(self, call: str, config: dict[str, Any]) -> None:
        try:
            message = await self._bus.request(f"{API}.{call}", msgspec.json.encode(config), timeout=TIMEOUT)
        except NoResponders:
            raise ConfigurationError("the NATS server has no JetStream: start it with --jetstream") from None
        error = _answer.decode(message.data).error
        if error is not None:
            raise ConfigurationError(f"JetStream refuses {call}: {error.description}")

    async def _put(self, subject: str, data: bytes, headers: Headers | None = None) -> int:
        message = await self._ask(subject, data, headers)
        stored = _stored.decode(message.data)
        if stored.error is not None:
            raise BusUnavailable(f"JetStream did not store {subject}: {stored.error.description}")
        return stored.seq

    async def _ask(self, subject: str, data: bytes, headers: Headers | None = None) -> Message:
        """A request that makes the streams anew when the server has lost its disk."""
        try:
            return await self._bus.request(subject, data, timeout=TIMEOUT, headers=headers)
        except NoResponders:
            await self.prepare()
            return await self._bus.request(subject, data, timeout=TIMEOUT, headers=headers)


def _durable(queue: str) -> str:
    """Name of the consumer that everybody who pulls a queue shares: such names are one token."""
    return queue.replace(".", "-")


def _item(message: Message) -> Item:
    """The subject of the acknowledgement ends in: deliveries, stream and consumer sequence, nanoseconds, pending."""
    fields = message.reply.split(".")
    deliveries, stored_at = (fields[4], fields[7]) if len(fields) == 9 else (fields[6], fields[9])
    return Item(message.data, message.headers, message.reply, int(deliveries), int(stored_at) / NANOSECONDS)
