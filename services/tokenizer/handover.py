"""Hands a request over: first a detokenizer opens the client's stream, then the queue takes the work.

In this order nobody is ever left without a voice: from the queue's acknowledgement on the request is not lost, and
whoever is to tell the client what became of it is there already.
"""

from enum import Enum

import msgspec

from pagewire.services.tokenizer.replicas import Replicas
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Headers
from pagewire.shared.errors import (
    BusError,
    DuplicateRequest,
    MessageTooLarge,
    NoResponders,
    Overloaded,
    PayloadTooLarge,
    RequestError,
    Unavailable,
)
from pagewire.shared.messages import Decoder, encode
from pagewire.shared.messages.open import Abandon, Opened, OpenState, OpenStream
from pagewire.shared.messages.work import WorkItem
from pagewire.shared.peers import Peers
from pagewire.shared.placement import rank

ANSWER_WITHIN = 2.0
"""Seconds that a detokenizer has to answer: as long as a service may be silent before it counts as gone."""
RETRY_AFTER_MS = 1000

_opened = Decoder(Opened)


class Outcome(Enum):
    """Who has the request now. Whichever it is, the detokenizer speaks to the client from here on."""

    STORED = "stored"
    """The work queue: it will be served."""
    ATTACHED = "attached"
    """It was there already."""
    ABANDONED = "abandoned"
    """Nobody: the detokenizer tells the client why."""


class Handover:
    """The way of requests for one model into the pipeline."""

    def __init__(self, bus: Bus, peers: Peers, replicas: Replicas, model: str) -> None:
        """`model` is the model's token in subjects."""
        self._bus = bus
        self._peers = peers
        self._replicas = replicas
        self._model = model

    async def deliver(self, opening: OpenStream, work: WorkItem, headers: Headers) -> Outcome:
        """Opens the stream at the detokenizer that the request id chooses, then stores the work.

        Raises:
            DuplicateRequest: the request id is taken by another body.
            Overloaded: the detokenizer has too many streams.
            PayloadTooLarge: a message does not fit.
            Unavailable: no detokenizer answers. Whatever is raised, the client has heard nothing yet.
        """
        instances = [beat.instance for beat in self._peers.alive("detokenizer") if beat.ready]
        for instance in rank(work.request_id, instances):
            try:
                state = await self._open(instance, opening, headers)
            except NoResponders:
                continue  # it has just gone, and no stream with it
            except MessageTooLarge as error:
                raise PayloadTooLarge("stop strings and prompts do not fit into a message: send less") from error
            except BusError:
                # It may have opened the stream all the same: if it lives, it is the one that tells the client.
                lost = Unavailable("the detokenizer does not answer: send the request again", RETRY_AFTER_MS)
                return await self._abandon(instance, work.request_id, lost)
            match state:
                case OpenState.ATTACHED:
                    return Outcome.ATTACHED
                case OpenState.CONFLICT:
                    raise DuplicateRequest(f"request_id {work.request_id} is taken by another request: choose another")
                case OpenState.FULL:
                    retry = self._replicas.retry_after_ms()
                    raise Overloaded("too many streams are open: send the request again later", retry)
                case OpenState.OPENED:
                    return await self._store(msgspec.structs.replace(work, detokenizer=instance), headers)
        raise Unavailable("no detokenizer is there: send the request again", RETRY_AFTER_MS)

    async def _open(self, instance: str, opening: OpenStream, headers: Headers) -> OpenState:
        subject = f"{subjects.DETOKENIZER}.{instance}.open"
        answer = await self._bus.request(subject, encode(opening), timeout=ANSWER_WITHIN, headers=headers)
        return OpenState(_opened.decode(answer.data).state)

    async def _store(self, work: WorkItem, headers: Headers) -> Outcome:
        queue = subjects.work_queue(self._model, work.priority, self._replicas.choose(work))
        try:
            await self._bus.store.put_work(queue, encode(work), headers=headers)
        except MessageTooLarge:
            too_large = PayloadTooLarge("the prompts do not fit into a message: send fewer or shorter ones")
            return await self._abandon(work.detokenizer, work.request_id, too_large)
        except BusError:
            unstored = Unavailable("the work queue does not answer: send the request again", RETRY_AFTER_MS)
            return await self._abandon(work.detokenizer, work.request_id, unstored)
        return Outcome.STORED

    async def _abandon(self, instance: str, request_id: str, error: RequestError) -> Outcome:
        """Has the detokenizer end the stream with `error`; raises it where the detokenizer cannot be reached."""
        subject = f"{subjects.DETOKENIZER}.{instance}.abandon"
        abandon = Abandon(request_id, error.kind, error.message)
        try:
            await self._bus.request(subject, encode(abandon), timeout=ANSWER_WITHIN)
        except BusError:
            raise error from None
        return Outcome.ABANDONED
