"""Cancels and resumes streams for clients, and turns their token ids into text."""

import asyncio
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import structlog
from tokenizers import Tokenizer

from pagewire.services.detokenizer.adopter import Adopter
from pagewire.services.detokenizer.bounded_tasks import BoundedTaskGroup
from pagewire.services.detokenizer.leaving_clients import LeavingClients
from pagewire.services.detokenizer.state.registry import Registry
from pagewire.services.detokenizer.state.stream import Stream
from pagewire.services.detokenizer.streams import Streams
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message, Subscription
from pagewire.shared.client_protocol.client_requests import decode_request, encoding_of
from pagewire.shared.client_protocol.replies import Replier
from pagewire.shared.errors import BusError, InvalidRequest, Overloaded, invalid_field
from pagewire.shared.messages.client import CancelReply, ResumeRequest
from pagewire.shared.messages.client_headers import LEAVES
from pagewire.shared.messages.tokenize import DetokenizeReply, DetokenizeRequest

OTHERS_ANSWER_WITHIN = 0.25
"""Seconds that the other instances have to answer for a request that the first one in rank does not know."""
FIRST_ANSWERS_WITHIN = 1.5
"""Seconds that the first instance in rank, which most probably owns a request, has to answer for one that this one does
not know: less than `pagewire.client.frames.CANCEL_TIMEOUT`."""
MAX_TOKEN_ID = 0xFFFF_FFFE
"""Largest id that a packed u32 holds, beside `NO_TOKEN`."""
RETRY_AFTER_MS = 500
"""Time after which a client should send a refused request again."""
QUEUE = "detokenizer"
"""Queue group of the requests that any instance can answer."""
_log = structlog.get_logger()


class ClientHandlers:
    """Answers requests of clients. A client reaches only the streams of its own tenant."""

    def __init__(
        self,
        bus: Bus,
        tokenizer: Tokenizer,
        streams: Streams,
        registry: Registry,
        replier: Replier,
        tasks: BoundedTaskGroup,
        adopter: Adopter,
        leaving: LeavingClients,
    ) -> None:
        self._bus = bus
        self._leaving = leaving
        self._tokenizer = tokenizer
        self._prefix = tokenizer.encode("").ids
        """Special tokens that `tokenize` puts before every text."""
        self._streams = streams
        self._registry = registry
        self._replier = replier
        self._tasks = tasks
        self._adopter = adopter
        self._instance = ""

    async def subscribe(self, instance: str, names: Iterable[str]) -> list[Subscription]:
        """Subscribes to requests about streams, also those that name other instances, as their streams may have been
        adopted here, and to detokenize requests. `names` are the model's tokens in subjects."""
        self._instance = instance
        handlers = [
            (f"{subjects.CANCEL}.*.*.*", self._on_cancel, ""),
            (f"{subjects.CANCEL}.*", self._on_cancel_by_id, ""),
            (f"{subjects.RESUME}.*.*.*", self._on_resume, ""),
            *((f"{subjects.DETOKENIZE}.{name}", self._on_detokenize, QUEUE) for name in dict.fromkeys(names)),
        ]
        return [
            await self._bus.subscribe(pattern, handler, queue=queue)
            for subject, handler, queue in handlers
            for pattern in subjects.for_everyone(subject)
        ]

    def _on_cancel(self, message: Message) -> None:
        """`pagewire.v1.cancel.<instance>.<request id>.<secret>`, the subject in the `accepted` frame."""
        target = _target_of(message)
        if self._is_mine(message, target):
            self._cancel(message, target, 0.0)

    def _on_cancel_by_id(self, message: Message) -> None:
        """`pagewire.v1.cancel.<request id>`, which every instance gets: for clients that know only the request id."""
        target = _Target(_owned(message, message.subject.rpartition(".")[2]), secret=None)
        first = self._adopter.is_first(target.request_id)
        self._cancel(message, target, OTHERS_ANSWER_WITHIN if first else FIRST_ANSWERS_WITHIN)

    def _is_mine(self, message: Message, target: "_Target") -> bool:
        """Returns whether this instance answers: it has the stream, or the subject names it."""
        if self._registry.find(target.request_id) is not None:
            return True
        instance = message.subject.rsplit(".", 3)[1]
        return instance == self._instance and not self._registry.has_dropped(target.request_id)

    def _cancel(self, message: Message, target: "_Target", delay: float) -> None:
        """Cancels a stream, or has one client leave it. The answer that the request is unknown is delayed by `delay`
        seconds."""
        stream = self._registry.find(target.request_id)
        if (inbox := message.headers.get(LEAVES)) is not None:
            if stream is not None and target.is_allowed(stream):
                self._leaving.leave(stream, inbox)
        elif stream is not None and target.is_allowed(stream):
            self._answer_cancel(message, "cancelled" if self._streams.cancel(stream) else "ended")
        elif message.reply:
            self._tasks.start(self._cancel_ended(message, target, delay))

    async def _cancel_ended(self, message: Message, target: "_Target", delay: float) -> None:
        try:
            stream = await self._recall(target)
        except BusError as error:
            _log.warning("record_not_read", request_id=target.request_id, reason=str(error))
            return
        if stream is None:
            asyncio.get_running_loop().call_later(delay, self._answer_cancel, message, "unknown")
        else:
            self._answer_cancel(message, "ended")

    def _answer_cancel(self, message: Message, state: Literal["cancelled", "ended", "unknown"]) -> None:
        if message.reply and self._accepts(message):
            self._replier.send(message, CancelReply(state))

    def _on_resume(self, message: Message) -> None:
        """`pagewire.v1.resume.<instance>.<request id>.<secret>`, the subject in the `accepted` frame."""
        target = _target_of(message)
        if not self._is_mine(message, target) or not self._accepts(message):
            return
        try:
            request = decode_request(message.data, ResumeRequest, encoding_of(message.headers))
            if request.start < 0:
                raise invalid_field("start", "counts from 0")
        except InvalidRequest as error:
            self._refuse_resume(message, error)
            return
        stream = self._registry.find(target.request_id)
        if stream is not None and target.is_allowed(stream):
            if not stream.abandoned:  # without an answer, the client sends its request again
                self._resume(message, stream, request.start)
        else:
            self._tasks.start(self._resume_ended(message, target, request.start))

    async def _resume_ended(self, message: Message, target: "_Target", start: int) -> None:
        try:
            stream = await self._recall(target)
        except BusError as error:  # without an answer, the client asks again
            _log.warning("record_not_read", request_id=target.request_id, reason=str(error))
            return
        if stream is not None:
            self._resume(message, stream, start)
        else:
            unknown = InvalidRequest("no such request runs or ended lately: send the request again")
            self._refuse_resume(message, unknown)

    def _resume(self, message: Message, stream: Stream, start: int) -> None:
        self._streams.resume(stream, message.reply, encoding_of(message.headers), start)

    def _refuse_resume(self, message: Message, error: InvalidRequest) -> None:
        """Sends an error as the last frame of a stream."""
        self._replier.refuse(message, error, subjects.owner_and_text(_target_of(message).request_id)[1])
        self._bus.publish(message.reply, b"")

    async def _recall(self, target: "_Target") -> Stream | None:
        """Returns the stream in memory or from its record, if the client may have it.

        Raises:
            BusError: the record cannot be read now.
        """
        stream = await self._registry.recall(target.request_id)
        return stream if stream is not None and target.is_allowed(stream) else None

    def _accepts(self, message: Message) -> bool:
        return self._replier.accepts(message.reply, subjects.tenant_of(message.subject))

    def _on_detokenize(self, message: Message) -> None:
        """`pagewire.v1.detokenize.<model>`."""
        if not self._accepts(message):
            return
        try:
            request = decode_request(message.data, DetokenizeRequest, encoding_of(message.headers))
        except InvalidRequest as error:
            self._replier.refuse(message, error)
            return
        if not self._tasks.start(self._detokenize(message, request)):
            self._replier.refuse(message, Overloaded("too many requests at once: send it again later", RETRY_AFTER_MS))

    async def _detokenize(self, message: Message, request: DetokenizeRequest) -> None:
        """Answers with the text. Special tokens are spelled out, except the ones that `tokenize` puts before a text."""
        tokens = request.token_ids
        if self._prefix and not request.keep_prefix and tokens[: len(self._prefix)] == self._prefix:
            tokens = tokens[len(self._prefix) :]
        try:
            text = await asyncio.to_thread(self._decode, tokens)
        except InvalidRequest as error:
            self._replier.refuse(message, error)
        else:
            self._replier.send(message, DetokenizeReply(text))

    def _decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens; on a thread, because a request may have millions of them."""
        if not all(0 <= token <= MAX_TOKEN_ID for token in tokens):
            raise invalid_field("token_ids", "holds a number that cannot be a token id")
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class _Target:
    """The stream that a client wants to cancel or resume."""

    request_id: str
    """Id of the request, `subjects.owned` by the client's tenant."""
    secret: bytes | None
    """Secret of the stream as the client gives it; None: the request id alone is enough."""

    def is_allowed(self, stream: Stream) -> bool:
        """Returns whether the client may have the stream. The duration of the comparison reveals no secret."""
        return self.secret is None or hmac.compare_digest(self.secret, stream.secret.hex().encode())


def _target_of(message: Message) -> _Target:
    """Returns the stream in a subject whose last tokens are the request id and the secret."""
    _, request_id, secret = message.subject.rsplit(".", 2)
    return _Target(_owned(message, request_id), secret.encode())


def _owned(message: Message, request_id: str) -> str:
    return subjects.owned(subjects.tenant_of(message.subject), request_id)
