"""The consumers by which JetStream delivers the items of the work queues: one per queue, which all its readers share.

In a cluster each consumer has a leader of its own. A consumer that is created while servers go and come may be left
without one for good; it delivers again when it is deleted and created anew.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress

from pagewire.shared import subjects
from pagewire.shared.bus.jetstream import NO_LEADER, NOT_FOUND, NOT_NOW, UNAVAILABLE, Error, NotNow, error_of
from pagewire.shared.bus.protocol import ACK_WAIT, Bus
from pagewire.shared.bus.store_replies import ConsumerInfo, consumer_info
from pagewire.shared.bus.stream_keeper import call_api
from pagewire.shared.bus.streams import NANOSECONDS, WORK_STREAM
from pagewire.shared.errors import RequestTimeout, StorageRefused

INACTIVE_AFTER = 3600.0
"""Seconds without a pull after which the server deletes the consumer of a queue. The queue's items stay."""
LEADERLESS = ConsumerInfo(error=Error("the consumer has no leader", UNAVAILABLE, NO_LEADER))
"""What is known of a consumer of a cluster that does not answer."""


class QueueConsumers:
    """The consumers that one connection uses."""

    def __init__(self, bus: Bus, replicas: int, restore: Callable[[str], Awaitable[None]]) -> None:
        """`replicas`: number of copies of each stream; `restore` creates the streams again for the subject that it is
        called with."""
        self._bus = bus
        self._replicas = replicas
        self._restore = restore
        self._created: set[str] = set()

    async def create(self, queue: str) -> None:
        """Creates the consumer of a queue, unless this connection has done so.

        A cluster without a leader creates none; the consumer may be there, which the next pull tells.

        Raises:
            StorageRefused: it cannot be created now.
            RequestTimeout: the only server does not answer.
        """
        if queue in self._created:
            return
        try:
            await self._create(queue)
        except (RequestTimeout, NotNow):
            if self._replicas == 1:
                raise
        self._created.add(queue)

    async def _create(self, queue: str) -> None:
        subject, durable = f"{subjects.WORK}.{queue}", durable_name(queue)
        config = {
            "durable_name": durable,
            "filter_subject": subject,
            "ack_policy": "explicit",
            "ack_wait": int(ACK_WAIT * NANOSECONDS),
            "max_ack_pending": -1,
            "max_deliver": -1,
            "inactive_threshold": int(INACTIVE_AFTER * NANOSECONDS),
        }
        call = f"CONSUMER.CREATE.{WORK_STREAM}.{durable}.{subject}"
        error = error_of(await call_api(self._bus, call, {"stream_name": WORK_STREAM, "config": config}))
        if error is not None:
            if error.err_code == NOT_FOUND:
                await self._restore(subject)
            if error.err_code in NOT_NOW:
                raise NotNow(error.description)
            raise StorageRefused(subject, error.description)

    def forget(self, queue: str) -> None:
        """Says that the consumer of a queue may be gone: it is created before the next pull."""
        self._created.discard(queue)

    async def info(self, queue: str) -> ConsumerInfo:
        """Returns what JetStream knows of the consumer of a queue.

        Only its leader answers, and for one that has had none for 10 s, the leader of the cluster, with an error.
        """
        try:
            answer = await call_api(self._bus, f"CONSUMER.INFO.{WORK_STREAM}.{durable_name(queue)}", {})
        except RequestTimeout:
            if self._replicas == 1:
                raise
            return LEADERLESS
        return consumer_info.decode(answer)

    async def delete(self, queue: str) -> None:
        """Deletes the consumer of a queue, which is created before its next pull.

        Raises:
            NotNow: the cluster has no leader, and deletes nothing.
        """
        self._created.discard(queue)
        with suppress(RequestTimeout):  # one without a leader is deleted, and nobody says so
            error = error_of(await call_api(self._bus, f"CONSUMER.DELETE.{WORK_STREAM}.{durable_name(queue)}", {}))
            if error is not None and error.err_code in NOT_NOW:
                raise NotNow(error.description)


def durable_name(queue: str) -> str:
    """Returns the name of the consumer of a queue. Names of consumers may not contain dots.

    >>> durable_name("llama.9.normal.any")
    'llama-9-normal-any'
    """
    return queue.replace(".", "-")
