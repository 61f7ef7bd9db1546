"""Dispatches a request: first a detokenizer opens the client's stream, then the work queue stores the work.

In this order the client always gets an answer: once the queue has acknowledged the work, the request is not lost, and
the detokenizer that sends the frames is already there.
"""

import asyncio
import time
from enum import Enum

import msgspec

from pagewire.services.tokenizer.router import Router
from pagewire.services.tokenizer.store_monitor import StoreMonitor
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Headers
from pagewire.shared.errors import (
    BusError,
    ConnectionLost,
    DuplicateRequest,
    MessageTooLarge,
    NoResponders,
    Overloaded,
    PayloadTooLarge,
    RequestError,
    RequestTimeout,
    StorageRefused,
    Unavailable,
)
from pagewire.shared.messages import Decoder, encode
from pagewire.shared.messages.open import AbortStream, Opened, OpenState, OpenStream
from pagewire.shared.messages.work import WorkItem
from pagewire.shared.peers import Peers
from pagewire.shared.placement import rank

ANSWER_TIMEOUT = 2.0
"""Seconds that a detokenizer has to answer: the time after which a silent service counts as gone."""
ABORT_TIMEOUT = 6.0
"""Seconds in which a detokenizer must answer an abort, across reconnections."""
ABORT_INTERVAL = 0.5
"""Seconds between two attempts to abort."""
OPEN_TIMEOUT = 15.0
"""Seconds in which a live detokenizer must open a stream. It cannot while the records have no leader."""
RECONNECT_TIMEOUT = 5.0
"""Seconds in which a stream is opened although the connection is lost, as when the broker restarts."""
ABSENCE = 1.0
"""Seconds that a live detokenizer may be absent from the broker: in a cluster it moves when its server dies."""
RETRY_INTERVAL = 0.1
"""Seconds between two attempts to open a stream."""
ELECTION_INTERVAL = 0.4
"""Additional seconds while the records have no leader."""
RETRY_AFTER_MS = 1000

_opened = Decoder(Opened)


class Outcome(Enum):
    """What became of a dispatched request. Whatever it is, the detokenizer sends the client everything from here on."""

    STORED = "stored"
    """The work queue has the request."""
    ATTACHED = "attached"
    """The same request runs or has ended already."""
    ABORTED = "aborted"
    """The request is not served: the detokenizer tells the client why."""


class Dispatcher:
    """Dispatches the requests for one model."""

    def __init__(self, bus: Bus, peers: Peers, router: Router, monitor: StoreMonitor, model: str) -> None:
        """`model` is the model's token in subjects."""
        self._monitor = monitor
        self._bus = bus
        self._peers = peers
        self._router = router
        self._model = model

    async def dispatch(self, opening: OpenStream, work: WorkItem, headers: Headers) -> Outcome:
        """Opens the stream at the detokenizer that ranks first for the request id, then stores the work.

        Raises:
            DuplicateRequest: the request id is taken by another body.
            Overloaded: the detokenizer has too many streams.
            PayloadTooLarge: a message does not fit.
            Unavailable: no detokenizer answers. Whatever is raised, the client has not been told yet.
        """
        for instance in rank(work.request_id, await self._ready_detokenizers()):
            try:
                state = await self._open(instance, opening, headers)
            except NoResponders:
                continue  # the detokenizer has just stopped, so that it has no stream of the client
            except MessageTooLarge as error:
                raise PayloadTooLarge("stop strings and prompts do not fit into a message: send less") from error
            except BusError:
                # The detokenizer may have opened the stream all the same: if it is alive, it tells the client.
                lost = Unavailable("the detokenizer does not answer: send the request again", RETRY_AFTER_MS)
                return await self._abort(instance, work.request_id, lost)
            match state:
                case OpenState.ATTACHED:
                    return Outcome.ATTACHED
                case OpenState.CONFLICT:
                    raise DuplicateRequest(f"request_id {work.request_id} is taken by another request: choose another")
                case OpenState.FULL:
                    retry = self._router.retry_after_ms()
                    raise Overloaded("too many streams are open: send the request again later", retry)
                case OpenState.UNAVAILABLE:
                    raise Unavailable("the records of ended requests cannot be read: send it again", RETRY_AFTER_MS)
                case OpenState.OPENED:
                    return await self._store(msgspec.structs.replace(work, detokenizer=instance), headers)
        raise Unavailable("no detokenizer is there: send the request again", RETRY_AFTER_MS)

    async def _ready_detokenizers(self) -> list[str]:
        """Returns the ready instances. If there is none, waits for one that may be moving to another server."""
        give_up_at = time.monotonic() + ABSENCE
        while True:
            ready = [beat.instance for beat in self._peers.alive("detokenizer") if beat.ready]
            if ready or time.monotonic() > give_up_at:
                return ready
            await asyncio.sleep(RETRY_INTERVAL)

    async def _open(self, instance: str, opening: OpenStream, headers: Headers) -> OpenState:
        """Opens the stream. Opening twice does no harm, so it asks again if a lost server may have lost a message.

        It also asks again while the detokenizer or this tokenizer moves to another server, and while the records of
        ended requests have no leader.
        """
        subject = f"{subjects.DETOKENIZER}.{instance}.open"
        began = time.monotonic()
        while True:
            asked = time.monotonic()
            try:
                answer = await self._bus.request(subject, encode(opening), timeout=ANSWER_TIMEOUT, headers=headers)
            except NoResponders:
                if self._peers.find(instance) is None or time.monotonic() > began + ABSENCE:
                    raise
            except ConnectionLost:
                if time.monotonic() > began + RECONNECT_TIMEOUT:
                    raise
            except RequestTimeout:
                if not self._has_spoken(instance, asked) or time.monotonic() > began + OPEN_TIMEOUT:
                    raise
            else:
                state = OpenState(_opened.decode(answer.data).state)
                unreadable = state is OpenState.UNAVAILABLE and not self._monitor.refusal
                if not unreadable or time.monotonic() > began + OPEN_TIMEOUT:
                    return state
                await asyncio.sleep(ELECTION_INTERVAL)
            await asyncio.sleep(RETRY_INTERVAL)

    def _has_spoken(self, instance: str, since: float) -> bool:
        """Returns whether a heartbeat of a detokenizer has arrived since a time, so that it is not frozen."""
        beat, age = self._peers.last(instance)
        return beat is not None and time.monotonic() - age > since

    async def _store(self, work: WorkItem, headers: Headers) -> Outcome:
        if self._monitor.refusal:
            return await self._abort(work.detokenizer, work.request_id, _refused(self._monitor.refusal))
        queue = subjects.work_queue(self._model, work.priority, self._router.choose(work))
        try:
            await self._bus.store.put_work(queue, encode(work), headers=headers)
        except MessageTooLarge:
            too_large = PayloadTooLarge("the prompts do not fit into a message: send fewer or shorter ones")
            return await self._abort(work.detokenizer, work.request_id, too_large)
        except StorageRefused as refusal:
            return await self._abort(work.detokenizer, work.request_id, _refused(refusal.reason))
        except BusError:
            unstored = Unavailable("the work queue does not answer: send the request again", RETRY_AFTER_MS)
            return await self._abort(work.detokenizer, work.request_id, unstored)
        return Outcome.STORED

    async def _abort(self, instance: str, request_id: str, error: RequestError) -> Outcome:
        """Has the detokenizer end the stream with `error`; raises `error` if the detokenizer does not answer.

        The abort is repeated: without it, the client of a stream without work would wait until its deadline.
        """
        subject = f"{subjects.DETOKENIZER}.{instance}.abort"
        abort = encode(AbortStream(request_id, error.kind, error.message))
        try:
            async with asyncio.timeout(ABORT_TIMEOUT):
                while True:
                    try:
                        await self._bus.request(subject, abort, timeout=ANSWER_TIMEOUT)
                    except BusError as failure:
                        if isinstance(failure, NoResponders) and self._peers.find(instance) is None:
                            break
                        await asyncio.sleep(ABORT_INTERVAL)
                    else:
                        return Outcome.ABORTED
        except TimeoutError:
            pass
        raise error from None


def _refused(reason: str) -> Unavailable:
    return Unavailable(f"the work queue takes nothing now ({reason}): send the request again later", RETRY_AFTER_MS)
