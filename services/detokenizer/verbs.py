"""What clients ask of the streams here: cancel and resume."""

import asyncio
from collections.abc import Coroutine
from typing import Literal

import structlog

from pagewire.services.detokenizer.inboxes import Inboxes
from pagewire.services.detokenizer.lookups import Lookups
from pagewire.services.detokenizer.registry import Registry
from pagewire.services.detokenizer.stream import Stream
from pagewire.services.detokenizer.streams import Streams
from pagewire.services.tokenizer.answers import Answers
from pagewire.services.tokenizer.decode import decode, encoding_of
from pagewire.shared.bus import Bus, Message
from pagewire.shared.errors import BusError, InvalidRequest
from pagewire.shared.messages.client import CancelReply, ResumeRequest

ELSEWHERE = 0.25
"""Seconds that the other instances have to answer for a request that this one does not know."""

_log = structlog.get_logger()


class Verbs:
    """One handler per subject. The request id is the last token of each."""

    def __init__(self, bus: Bus, inboxes: Inboxes, streams: Streams, registry: Registry, lookups: Lookups) -> None:
        self._bus = bus
        self._answers = Answers(bus)
        self._inboxes = inboxes
        self._streams = streams
        self._registry = registry
        self._lookups = lookups

    def on_cancel(self, message: Message) -> None:
        """`pagewire.v1.cancel.<instance>.<request id>`, as `accepted` names it."""
        self._cancel(message, 0.0)

    def on_cancel_anywhere(self, message: Message) -> None:
        """`pagewire.v1.cancel.<request id>`, heard by every instance: for those who know nothing but the id."""
        self._cancel(message, ELSEWHERE)

    def on_resume(self, message: Message) -> None:
        """`pagewire.v1.resume.<instance>.<request id>`."""
        if not self._inboxes.accept(message.reply):
            return
        try:
            request = decode(message.data, ResumeRequest, encoding_of(message.headers))
            if request.start < 0:
                raise InvalidRequest("start counts from 0")
        except InvalidRequest as error:
            self._refuse_stream(message, error)
            return
        stream = self._registry.find(_request_id(message))
        if stream is not None:
            self._resume(message, stream, request.start)
        else:
            self._look_up(self._resume_ended(message, request.start))

    def _cancel(self, message: Message, patience: float) -> None:
        stream = self._registry.find(_request_id(message))
        if stream is not None:
            self._answer_cancel(message, "cancelled" if self._streams.cancel(stream) else "ended")
        elif message.reply:
            self._look_up(self._cancel_ended(message, patience))

    async def _cancel_ended(self, message: Message, patience: float) -> None:
        stream = await self._recall(message)
        if stream is None:
            await asyncio.sleep(patience)
        self._answer_cancel(message, "unknown" if stream is None else "ended")

    def _answer_cancel(self, message: Message, state: Literal["cancelled", "ended", "unknown"]) -> None:
        if message.reply and self._inboxes.accept(message.reply):
            self._answers.send(message, CancelReply(state))

    async def _resume_ended(self, message: Message, start: int) -> None:
        stream = await self._recall(message)
        if stream is not None:
            self._resume(message, stream, start)
        else:
            self._refuse_stream(message, InvalidRequest("no such request runs or ended lately: send the request again"))

    def _resume(self, message: Message, stream: Stream, start: int) -> None:
        self._streams.resume(stream, message.reply, encoding_of(message.headers), start)

    async def _recall(self, message: Message) -> Stream | None:
        try:
            return await self._registry.recall(_request_id(message))
        except BusError as error:
            _log.warning("record_not_read", request_id=_request_id(message), reason=str(error))
            return None

    def _refuse_stream(self, message: Message, error: InvalidRequest) -> None:
        """An error as the last frame of a stream."""
        self._answers.refuse(message, error, _request_id(message))
        self._bus.publish(message.reply, b"")

    def _look_up(self, work: Coroutine[None, None, None]) -> None:
        """Without room for it the request stays unanswered: its client asks again."""
        if self._lookups.full:
            work.close()
        else:
            self._lookups.start(work)


def _request_id(message: Message) -> str:
    return message.subject.rpartition(".")[2]
