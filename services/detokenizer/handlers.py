"""The subscriptions of a detokenizer and what answers them.

Services open, attach and abort streams. Clients cancel and resume them, and turn token ids into text.
"""

import asyncio
from collections.abc import Coroutine
from typing import Literal

import structlog
from tokenizers import Tokenizer

from pagewire.services.detokenizer.adopter import Adopter
from pagewire.services.detokenizer.registry import Registry
from pagewire.services.detokenizer.stream import Stream
from pagewire.services.detokenizer.streams import Streams
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message, Subscription
from pagewire.shared.client_requests import decode_request, encoding_of
from pagewire.shared.errors import REQUEST_ERRORS, BusError, Internal, InvalidRequest, Overloaded
from pagewire.shared.messages import Decoder, Wire, encode, unpack
from pagewire.shared.messages.attach import Attach, Attached, AttachState
from pagewire.shared.messages.client import CancelReply, DetokenizeReply, DetokenizeRequest, ResumeRequest
from pagewire.shared.messages.open import AbortStream, Opened, OpenState, OpenStream
from pagewire.shared.replies import Replier
from pagewire.shared.vocabulary import Vocabulary

MAX_TASKS = 1024
"""Requests at once that wait for something, such as a record."""
OTHERS_ANSWER_WITHIN = 0.25
"""Seconds that the other instances have to answer for a request that this one does not know."""
MAX_TOKEN_ID = 0xFFFF_FFFE
RETRY_AFTER_MS = 500
QUEUE = "detokenizer"
"""Queue group of the requests that any instance can answer."""

_log = structlog.get_logger()
_open = Decoder(OpenStream)
_attach = Decoder(Attach)
_abort = Decoder(AbortStream)


class BoundedTaskGroup:
    """Starts tasks in a task group, up to `MAX_TASKS` at once."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._running = 0

    @property
    def full(self) -> bool:
        """Whether no more tasks can be started."""
        return self._running >= MAX_TASKS

    def start(self, work: Coroutine[None, None, None]) -> bool:
        """Starts a task; returns False, and drops `work`, if the group is full."""
        if self.full:
            work.close()
            return False
        self._running += 1
        self._tasks.create_task(work).add_done_callback(self._ended)
        return True

    def _ended(self, _: "asyncio.Task[None]") -> None:
        self._running -= 1


class ServiceHandlers:
    """Opens, attaches and aborts streams for tokenizers and schedulers."""

    def __init__(
        self,
        bus: Bus,
        vocabulary: Vocabulary,
        streams: Streams,
        registry: Registry,
        replier: Replier,
        tasks: BoundedTaskGroup,
        adopter: Adopter,
    ) -> None:
        self._bus = bus
        self._adopter = adopter
        self._vocabulary = vocabulary
        self._streams = streams
        self._registry = registry
        self._replier = replier
        self._tasks = tasks
        self._verbs = {"open": self._on_open, "attach": self._on_attach, "abort": self._on_abort, "ping": self._on_ping}

    async def subscribe(self, instance: str) -> list[Subscription]:
        """Subscribes to all verbs at once, since the order of these messages matters."""
        return [await self._bus.subscribe(f"{subjects.DETOKENIZER}.{instance}.*", self._on_message)]

    def _on_message(self, message: Message) -> None:
        """`pagewire.svc.detokenizer.<instance>.<verb>`."""
        handler = self._verbs.get(message.subject.rpartition(".")[2])
        if handler is None:
            _log.error("message_unreadable", subject=message.subject, reason="unknown verb")
        else:
            handler(message)

    def _on_open(self, message: Message) -> None:
        request = _open.read(message)
        if request is None or not self._replier.accepts(request.reply):  # the tokenizer has checked the reply before
            return
        if not self._tasks.start(self._open(message, request)):
            self._answer(message, Opened(OpenState.FULL))

    async def _open(self, message: Message, request: OpenStream) -> None:
        try:
            state = await self._streams.open(request, self._vocabulary, message.headers)
        except BusError as error:
            _log.warning("stream_not_opened", request_id=request.request_id, reason=str(error))
            state = OpenState.UNAVAILABLE
        self._answer(message, Opened(state))

    def _on_attach(self, message: Message) -> None:
        attach = _attach.read(message)
        if attach is None:
            return
        stream = self._registry.find(attach.request_id)
        if attach.opening:
            self._tasks.start(self._adopt(message, attach))  # without an answer, the scheduler asks again
        elif stream is not None:
            self._answer(message, self._streams.attach(stream, attach))
        else:
            self._tasks.start(self._attach_ended(message, attach))  # without an answer, the scheduler asks again

    async def _adopt(self, message: Message, attach: Attach) -> None:
        """Opens the stream of another detokenizer, unless it is here, and attaches it."""
        opening = _open.try_decode(attach.opening)
        if opening is None:
            _log.error("opening_unreadable", request_id=attach.request_id)
            return
        try:
            stream = await self._streams.adopt(opening, self._vocabulary, message.headers, unpack(attach.sent))
        except BusError as error:
            _log.warning("stream_not_adopted", request_id=attach.request_id, reason=str(error))
            return
        if stream.digest != opening.digest:  # the id belongs to another request since
            self._answer(message, Attached(AttachState.ENDED, (), b""))
            self._streams.end_work(attach.ack)
            return
        answer = self._streams.attach(stream, attach)
        if answer.state == AttachState.OPEN:
            self._adopter.announce([stream])
        self._answer(message, answer)

    async def _attach_ended(self, message: Message, attach: Attach) -> None:
        try:
            stream = await self._registry.recall(attach.request_id)
        except BusError as error:  # without an answer, the scheduler asks again
            _log.warning("record_not_read", request_id=attach.request_id, reason=str(error))
            return
        if stream is None:
            self._answer(message, Attached(AttachState.UNKNOWN, (), b""))
        else:
            self._answer(message, self._streams.attach(stream, attach))

    def _on_abort(self, message: Message) -> None:
        abort = _abort.read(message)
        if abort is None:
            return
        stream = self._registry.find(abort.request_id)
        if stream is not None:
            self._streams.abort(stream, REQUEST_ERRORS.get(abort.error, Internal)(abort.message))
        if message.reply:
            self._bus.publish(message.reply, b"")

    def _on_ping(self, message: Message) -> None:
        """Shows that this instance is there."""
        if message.reply:
            self._bus.publish(message.reply, b"")

    def _answer(self, message: Message, answer: Wire) -> None:
        if message.reply:
            self._bus.publish(message.reply, encode(answer))


class ClientHandlers:
    """Answers the requests of clients. The last token of a subject is the request id, or the model to detokenize."""

    def __init__(
        self,
        bus: Bus,
        tokenizer: Tokenizer,
        streams: Streams,
        registry: Registry,
        replier: Replier,
        tasks: BoundedTaskGroup,
    ) -> None:
        self._bus = bus
        self._tokenizer = tokenizer
        self._prefix = tokenizer.encode("").ids
        """Special tokens that `tokenize` puts before every text."""
        self._streams = streams
        self._registry = registry
        self._replier = replier
        self._tasks = tasks
        self._instance = ""

    async def subscribe(self, instance: str, model: str) -> list[Subscription]:
        """Subscribes to what clients ask. `model` is the model's token in subjects.

        That includes what they ask of other instances, whose streams may have been adopted here.
        """
        self._instance = instance
        return [
            await self._bus.subscribe(f"{subjects.CANCEL}.*.*", self._on_cancel),
            await self._bus.subscribe(f"{subjects.CANCEL}.*", self._on_cancel_by_id),
            await self._bus.subscribe(f"{subjects.RESUME}.*.*", self._on_resume),
            await self._bus.subscribe(f"{subjects.DETOKENIZE}.{model}", self._on_detokenize, queue=QUEUE),
        ]

    def _on_cancel(self, message: Message) -> None:
        """`pagewire.v1.cancel.<instance>.<request id>`, the subject in the `accepted` frame."""
        if self._is_mine(message):
            self._cancel(message, 0.0)

    def _on_cancel_by_id(self, message: Message) -> None:
        """`pagewire.v1.cancel.<request id>`, which every instance gets: for clients that know only the request id."""
        self._cancel(message, OTHERS_ANSWER_WITHIN)

    def _is_mine(self, message: Message) -> bool:
        """Returns whether this instance answers: it is named in the subject, or has the stream of the one named."""
        instance, request_id = message.subject.split(".")[3:5]
        if self._registry.find(request_id) is not None:
            return True
        return instance == self._instance and not self._registry.has_dropped(request_id)

    def _cancel(self, message: Message, delay: float) -> None:
        """Cancels a stream. The answer that the request is unknown is delayed by `delay` seconds."""
        stream = self._registry.find(_last_token(message))
        if stream is not None:
            self._answer_cancel(message, "cancelled" if self._streams.cancel(stream) else "ended")
        elif message.reply:
            self._tasks.start(self._cancel_ended(message, delay))

    async def _cancel_ended(self, message: Message, delay: float) -> None:
        stream = await self._recall(message)
        if stream is None:
            await asyncio.sleep(delay)
        self._answer_cancel(message, "unknown" if stream is None else "ended")

    def _answer_cancel(self, message: Message, state: Literal["cancelled", "ended", "unknown"]) -> None:
        if message.reply and self._replier.accepts(message.reply):
            self._replier.send(message, CancelReply(state))

    def _on_resume(self, message: Message) -> None:
        """`pagewire.v1.resume.<instance>.<request id>`."""
        if not self._is_mine(message) or not self._replier.accepts(message.reply):
            return
        try:
            request = decode_request(message.data, ResumeRequest, encoding_of(message.headers))
            if request.start < 0:
                raise InvalidRequest("start counts from 0")
        except InvalidRequest as error:
            self._refuse_resume(message, error)
            return
        stream = self._registry.find(_last_token(message))
        if stream is not None:
            self._resume(message, stream, request.start)
        else:
            self._tasks.start(self._resume_ended(message, request.start))  # without an answer, the client asks again

    async def _resume_ended(self, message: Message, start: int) -> None:
        stream = await self._recall(message)
        if stream is not None:
            self._resume(message, stream, start)
        else:
            error = InvalidRequest("no such request runs or ended lately: send the request again")
            self._refuse_resume(message, error)

    def _resume(self, message: Message, stream: Stream, start: int) -> None:
        self._streams.resume(stream, message.reply, encoding_of(message.headers), start)

    def _refuse_resume(self, message: Message, error: InvalidRequest) -> None:
        """Sends an error as the last frame of a stream."""
        self._replier.refuse(message, error, _last_token(message))
        self._bus.publish(message.reply, b"")

    async def _recall(self, message: Message) -> Stream | None:
        try:
            return await self._registry.recall(_last_token(message))
        except BusError as error:
            _log.warning("record_not_read", request_id=_last_token(message), reason=str(error))
            return None

    def _on_detokenize(self, message: Message) -> None:
        """`pagewire.v1.detokenize.<model>`."""
        if not self._replier.accepts(message.reply):
            return
        try:
            request = decode_request(message.data, DetokenizeRequest, encoding_of(message.headers))
            if not all(0 <= token <= MAX_TOKEN_ID for token in request.token_ids):
                raise InvalidRequest("token_ids holds a number that cannot be a token id")
        except InvalidRequest as error:
            self._replier.refuse(message, error)
            return
        if not self._tasks.start(self._detokenize(message, request.token_ids)):
            self._replier.refuse(message, Overloaded("too many requests at once: send it again later", RETRY_AFTER_MS))

    async def _detokenize(self, message: Message, tokens: list[int]) -> None:
        """Answers with the text, special tokens spelled out except those that `tokenize` puts before every text."""
        if self._prefix and tokens[: len(self._prefix)] == self._prefix:
            tokens = tokens[len(self._prefix) :]
        text = await asyncio.to_thread(self._tokenizer.decode, tokens, skip_special_tokens=False)
        self._replier.send(message, DetokenizeReply(text))


def _last_token(message: Message) -> str:
    return message.subject.rpartition(".")[2]
