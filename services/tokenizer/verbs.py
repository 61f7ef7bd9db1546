"""What clients can ask of a tokenizer: one handler per subject."""

import time
from collections.abc import Coroutine
from typing import Any

import structlog

from pagewire.services.tokenizer.answers import Answers
from pagewire.services.tokenizer.chat.renderer import ChatRenderer
from pagewire.services.tokenizer.decode import decode, encoding_of
from pagewire.services.tokenizer.generate import Generate
from pagewire.services.tokenizer.inflight import InFlight
from pagewire.services.tokenizer.model import Model
from pagewire.services.tokenizer.replicas import Replicas
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.context import Context
from pagewire.shared.errors import Internal, ModelNotFound, Overloaded, RequestError
from pagewire.shared.messages.client import ModelList, TokenizeReply, TokenizeRequest
from pagewire.shared.peers import Peers

_log = structlog.get_logger()


class Verbs:
    """Answers what comes in, or starts a task that does. Counts what it sees."""

    def __init__(
        self,
        context: Context,
        peers: Peers,
        replicas: Replicas,
        model: Model,
        renderer: ChatRenderer,
        in_flight: InFlight,
    ) -> None:
        self._replicas = replicas
        self._model = model
        self._in_flight = in_flight
        self._answers = Answers(context.bus)
        self._generate = Generate(context.bus, peers, replicas, model, renderer, context.settings.seed)
        self.requests = 0
        """Requests from client inboxes."""
        self.dropped = 0
        """Messages without an inbox to answer to."""

    def on_generate(self, message: Message) -> None:
        """`pagewire.v1.generate.<model>`."""
        if self._is_for_us(message):
            self._start(message, self._generate.serve(message, time.monotonic()))

    def on_tokenize(self, message: Message) -> None:
        """`pagewire.v1.tokenize.<model>`."""
        if self._is_for_us(message):
            self._start(message, self._tokenize(message))

    def on_models(self, message: Message) -> None:
        """`pagewire.v1.models`."""
        if self._has_inbox(message):
            self._answers.send(message, ModelList([self._model.info]))

    async def _tokenize(self, message: Message) -> None:
        try:
            request = decode(message.data, TokenizeRequest, encoding_of(message.headers))
        except RequestError as error:
            self._answers.refuse(message, error)
            return
        ids = await self._model.encoder.encode([request.text])
        self._answers.send(message, TokenizeReply(ids[0]))

    def _has_inbox(self, message: Message) -> bool:
        """Whether the message may be answered at all: any other reply subject could be one of the services' own."""
        if not subjects.is_client_inbox(message.reply):
            self.dropped += 1
            return False
        self.requests += 1
        return True

    def _is_for_us(self, message: Message) -> bool:
        """Whether a request can be taken; the client is told if not."""
        if not self._has_inbox(message):
            return False
        asked = message.subject.rpartition(".")[2]
        if asked != self._model.token:
            self._answers.refuse(message, ModelNotFound(f"there is no model {asked} here, but {self._model.name}"))
            return False
        if not self._in_flight.has_room(len(message.data)):
            retry = self._replicas.retry_after_ms()
            busy = Overloaded("too many requests are arriving: send the request again later", retry)
            self._answers.refuse(message, busy)
            return False
        return True

    def _start(self, message: Message, work: Coroutine[Any, Any, None]) -> None:
        def failed(error: BaseException) -> None:
            _log.error("request_failed", exc_info=error)
            self._answers.refuse(message, Internal("the request met a fault of the server: its log has the details"))

        self._in_flight.start(work, len(message.data), failed)
