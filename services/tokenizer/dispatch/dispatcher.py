"""The third stage of a request: a detokenizer opens the client's stream, then the work queue stores the work.

The stream comes first, because only its detokenizer knows whether the request is new: a repeated request joins its
stream, another body under the same id is a conflict, and a full detokenizer opens nothing. Work that was stored before
the answer could not be taken back. Once the queue has acknowledged the work, the request cannot be lost.
"""

import asyncio
import time
from collections.abc import MutableSet, Set
from enum import Enum

import msgspec

from pagewire.services.tokenizer.dispatch.admission import Admission
from pagewire.services.tokenizer.dispatch.replica_router import ReplicaRouter
from pagewire.services.tokenizer.dispatch.request_messages import RequestMessages
from pagewire.services.tokenizer.dispatch.store_monitor import StoreMonitor
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
from pagewire.shared.messages.heartbeat import AWAITS_SUCCESSOR
from pagewire.shared.messages.open import AbortStream, Opened, OpenState, StoredWork
from pagewire.shared.messages.work import WorkItem
from pagewire.shared.process.peers import Peers
from pagewire.shared.rendezvous import rank

ANSWER_TIMEOUT = 2.0
"""Seconds that a detokenizer has to answer: the time after which a silent service counts as gone."""
STOOD_STILL = 0.25
"""Seconds by which a timer is late if this process was frozen."""
BROKER_ANSWERS_WITHIN = 0.25
"""Seconds within which a working broker answers a ping, also on a busy machine."""
ABORT_TIMEOUT = 6.0
"""Seconds in which a detokenizer must answer an abort, across reconnections."""
ABORT_INTERVAL = 0.5
"""Seconds between two attempts to abort."""
OPEN_TIMEOUT = 15.0
"""Seconds in which a live detokenizer must open a stream. It cannot while the records have no leader."""
RECONNECT_TIMEOUT = 5.0
"""Seconds for which opening is tried again after the connection was lost, as when the broker restarts."""
RECONNECT_INTERVAL = 0.05
"""Seconds between two attempts to find a connection, or a detokenizer."""
ABSENCE = 1.0
"""Seconds that a live detokenizer may be absent from the broker: in a cluster it moves when its server dies."""
ELECTION_INTERVAL = 0.5
"""Seconds between two attempts to open a stream while the records have no leader."""
SUCCESSOR_TIMEOUT = 12.0
"""Seconds that a request waits for a detokenizer: a restarted one is ready after 2, beside 8 busy processes after 9.

Less than the 15 seconds after which a client sends a request again that has no answer."""
RETRY_AFTER_MS = 1000
"""Time after which a client should send a request again that could not be dispatched."""
STORED_KEPT = 16_384
"""Ids of stored requests that are remembered, as clients that wait for a result send their requests again."""

_opened = Decoder(Opened)


class Outcome(Enum):
    """Outcome of a request that reached a detokenizer, which sends the client everything from then on."""

    STORED = "stored"
    """The work queue has the request."""
    ATTACHED = "attached"
    """The client has joined the stream of the request, which was sent before."""
    ABORTED = "aborted"
    """The request is not served, and the detokenizer tells the client why."""


class Dispatcher:
    """Dispatches the requests for one model.

    Attributes:
        stopping: whether the server takes no new requests. Requests that it has accepted may still be sent again.
    """

    def __init__(
        self, bus: Bus, peers: Peers, router: ReplicaRouter, monitor: StoreMonitor, admission: Admission, model: str
    ) -> None:
        """`model` is the model's token in subjects."""
        self.stopping = False
        self._monitor = monitor
        self._bus = bus
        self._peers = peers
        self._router = router
        self._admission = admission
        self._model = model
        self._stored: dict[str, None] = {}
        """Ids of the requests that were stored last, in that order."""

    async def dispatch(self, messages: RequestMessages, refusal: Overloaded | None = None) -> Outcome:
        """Opens the stream at the detokenizer that ranks first for the request id, then stores the work.

        With `refusal`, a known request joins its stream, and a new one is refused with that error.

        Raises:
            DuplicateRequest: the request id is taken by another body.
            Overloaded: the request is not admitted, or the detokenizer has too many streams.
            PayloadTooLarge: a message does not fit.
            Unavailable: no detokenizer answers. As with every error, the client has heard nothing yet.
        """
        opening, work, headers = messages.opening, messages.work, messages.headers
        joins = self.stopping or refusal is not None
        item = encode(opening)
        encoded = encode(msgspec.structs.replace(opening, joins=True)) if joins else item
        began = time.monotonic()
        excluded: set[str] = set()
        missing: set[str] = set()
        while instance := await self._choose(work.request_id, excluded, missing, began, joins=joins):
            try:
                state = await self._open(instance, encoded, headers)
            except NoResponders:
                missing.add(instance)  # the request has not reached it
                continue
            except MessageTooLarge as error:
                raise PayloadTooLarge("stop strings and prompts do not fit into a message: send less") from error
            except BusError:
                # The detokenizer may have opened the stream all the same: if it is alive, it ends the stream.
                lost = Unavailable("the detokenizer does not answer: send the request again", RETRY_AFTER_MS)
                if self._peers.gone(instance) or not await self._abort(instance, work.request_id, lost):
                    excluded.add(instance)  # it sends nothing any more, so another one can open the stream
                    continue
                return Outcome.ABORTED
            match state:
                case OpenState.ATTACHED:
                    return Outcome.ATTACHED
                case OpenState.CONFLICT:
                    _, request_id = subjects.owner_and_text(work.request_id)
                    raise DuplicateRequest(f"request_id {request_id} is taken by another request: choose another")
                case OpenState.FULL:
                    retry = self._admission.retry_after_ms(work.priority)
                    raise Overloaded("too many streams are open: send the request again later", retry)
                case OpenState.UNAVAILABLE:
                    raise Unavailable("the records of ended requests cannot be read: send it again", RETRY_AFTER_MS)
                case OpenState.ABSENT:
                    excluded.add(instance)
                case OpenState.WAITING if work.request_id in self._stored:
                    return Outcome.ATTACHED
                case OpenState.OPENED | OpenState.WAITING:
                    stored = msgspec.structs.replace(work, detokenizer=instance, opening=item)
                    return await self._store(stored, headers)
        if self.stopping:
            raise Unavailable("the server is stopping: send the request again later", RETRY_AFTER_MS)
        if refusal is not None:
            raise refusal
        raise Unavailable("no detokenizer is there: send the request again", RETRY_AFTER_MS)

    async def _choose(
        self, request_id: str, excluded: Set[str], missing: MutableSet[str], began: float, *, joins: bool
    ) -> str:
        """Returns the ready detokenizer that ranks first and is not excluded; empty if none comes in time.

        Waits for one, as this tokenizer may be new, or the only detokenizer may have a successor soon; not with `joins`
        once a detokenizer has answered that it does not know the request. If none is ready, a draining one that awaits
        its successor is chosen. The ones that are `missing` on the bus come last: after a restart of the broker they
        may not have subscribed again yet.
        """
        while True:
            alive = self._peers.alive("detokenizer")
            ready = {beat.instance for beat in alive if beat.ready} - excluded
            ready = ready or {beat.instance for beat in alive if beat.load.get(AWAITS_SUCCESSOR)} - excluded
            if ranked := rank(request_id, ready - missing):
                return ranked[0]
            timeout = RECONNECT_TIMEOUT if ready else SUCCESSOR_TIMEOUT
            if (joins and excluded) or time.monotonic() - began >= timeout:
                return ""
            missing.clear()
            await asyncio.sleep(RECONNECT_INTERVAL)

    async def _open(self, instance: str, opening: bytes, headers: Headers) -> OpenState:
        """Opens the stream. Opening twice does no harm, so a live detokenizer is asked again in six cases:

        - It is absent from the broker: it may be moving to another server.
        - The connection is lost: the detokenizer may have the stream, and may not have subscribed again yet.
        - It does not answer, although its heartbeats arrive: a lost server may have lost a message, too.
        - It does not answer, and neither does the broker.
        - This process was frozen for longer than an answer may take, and has not read the answer.
        - It cannot read the records of ended requests, because they have no leader.
        """
        subject = f"{subjects.DETOKENIZER}.{instance}.open"
        lost, began = False, time.monotonic()
        while True:
            asked_at = time.monotonic()
            try:
                answer = await self._bus.request(subject, opening, timeout=ANSWER_TIMEOUT, headers=headers)
            except (ConnectionLost, NoResponders) as error:
                lost |= isinstance(error, ConnectionLost)
                gone = self._peers.gone(instance) if lost else self._peers.find(instance) is None
                if gone or time.monotonic() - began >= (RECONNECT_TIMEOUT if lost else ABSENCE):
                    raise
                await asyncio.sleep(RECONNECT_INTERVAL)
            except RequestTimeout:
                lost = True
                if (now := time.monotonic()) - asked_at > ANSWER_TIMEOUT + STOOD_STILL:
                    began = now
                    continue
                alive = self._has_spoken(instance, asked_at) or await self._broker_was_silent()
                if not alive or time.monotonic() - began >= OPEN_TIMEOUT:
                    raise
            else:
                state = OpenState(_opened.decode(answer.data).state)
                leaderless = state is OpenState.UNAVAILABLE and not self._monitor.refusal
                if not leaderless or time.monotonic() - began >= OPEN_TIMEOUT:
                    return state
                await asyncio.sleep(ELECTION_INTERVAL)

    async def _broker_was_silent(self) -> bool:
        """Returns whether the broker itself has not answered, as a frozen one; waits until it answers again."""
        asked_at = time.monotonic()
        try:
            await self._bus.flush(timeout=ANSWER_TIMEOUT)
        except BusError:
            return True
        return time.monotonic() - asked_at > BROKER_ANSWERS_WITHIN

    def _has_spoken(self, instance: str, since: float) -> bool:
        """Returns whether a heartbeat of a detokenizer has arrived after the time `since`, so that it is not frozen."""
        beat, heard_at = self._peers.last(instance)
        return beat is not None and heard_at > since

    async def _store(self, work: WorkItem, headers: Headers) -> Outcome:
        """Stores the work of a stream that is open; if that is not possible, has the stream aborted."""
        try:
            if self._monitor.refusal:
                raise StorageRefused(self._model, self._monitor.refusal)
            queue = subjects.work_queue(self._model, work.priority, self._router.choose(work))
            number = await self._bus.store.put_work(queue, encode(work), headers=headers)
        except BusError as error:
            unstored = _unstored(error)
            if await self._abort(work.detokenizer, work.request_id, unstored):
                return Outcome.ABORTED
            raise unstored from None
        self._admission.on_stored(work.priority, number)
        self._bus.publish(
            f"{subjects.DETOKENIZER}.{work.detokenizer}.stored", encode(StoredWork(work.request_id, number))
        )
        self._stored[work.request_id] = None
        if len(self._stored) > STORED_KEPT:
            del self._stored[next(iter(self._stored))]
        return Outcome.STORED

    async def _abort(self, instance: str, request_id: str, error: RequestError) -> bool:
        """Has the detokenizer end the stream with `error`, unless the request is in a queue since an earlier attempt;
        returns whether the detokenizer has answered.

        The abort is repeated: the client of a stream without work would wait until its deadline.
        """
        subject = f"{subjects.DETOKENIZER}.{instance}.abort"
        abort = encode(AbortStream(request_id, error.kind, error.message, unless_accepted=True))
        try:
            async with asyncio.timeout(ABORT_TIMEOUT):
                while True:
                    try:
                        await self._bus.request(subject, abort, timeout=ANSWER_TIMEOUT)
                    except BusError as failure:
                        if isinstance(failure, NoResponders) and self._peers.gone(instance):
                            return False
                        await asyncio.sleep(ABORT_INTERVAL)
                    else:
                        return True
        except TimeoutError:
            return False


def _unstored(error: BusError) -> RequestError:
    """Returns the error of a request whose work could not be stored."""
    match error:
        case MessageTooLarge():
            return PayloadTooLarge("the prompts do not fit into a message: send fewer or shorter ones")
        case StorageRefused():
            reason = f"the work queue takes nothing now ({error.reason}): send the request again later"
            return Unavailable(reason, RETRY_AFTER_MS)
        case _:
            return Unavailable("the work queue does not answer: send the request again", RETRY_AFTER_MS)
