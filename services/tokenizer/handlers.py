"""The subscriptions of a tokenizer: each request is admitted or refused as it arrives, before its prompt is encoded."""

import time
from collections.abc import Coroutine, Iterator
from typing import Any

import structlog
from msgspec.structs import replace

from pagewire.services.tokenizer.chat.renderer import ChatRenderer
from pagewire.services.tokenizer.dispatch.admission import Admission
from pagewire.services.tokenizer.dispatch.dispatcher import Dispatcher
from pagewire.services.tokenizer.dispatch.replica_router import ReplicaRouter
from pagewire.services.tokenizer.dispatch.store_monitor import StoreMonitor
from pagewire.services.tokenizer.input_processor import InputProcessor
from pagewire.services.tokenizer.other_models import OtherModels, passed_on
from pagewire.services.tokenizer.request_encoder import RequestEncoder
from pagewire.services.tokenizer.request_tasks import RequestTasks
from pagewire.services.tokenizer.served_model import Model
from pagewire.services.tokenizer.validation.request_checks import MAX_TIMEOUT_MS
from pagewire.shared import subjects
from pagewire.shared.bus import Handler, Message, Subscription
from pagewire.shared.client_protocol.client_requests import decode_head, decode_request, encoding_of
from pagewire.shared.client_protocol.replies import Replier
from pagewire.shared.errors import Internal, Overloaded, RequestError, Unavailable
from pagewire.shared.messages.client import ModelInfo, ModelList
from pagewire.shared.messages.client_headers import FRESH
from pagewire.shared.messages.tokenize import TokenizeRequest
from pagewire.shared.metrics.metric import Sample
from pagewire.shared.process.context import Context
from pagewire.shared.process.peers import Peers

QUEUE = "tokenizer"
"""Queue group of all tokenizers: each request goes to one of them."""

_log = structlog.get_logger()


class Handlers:
    """Answers requests, or starts a task that does."""

    def __init__(
        self,
        context: Context,
        peers: Peers,
        router: ReplicaRouter,
        monitor: StoreMonitor,
        admission: Admission,
        model: Model,
        renderer: ChatRenderer,
        tasks: RequestTasks,
    ) -> None:
        bus = context.bus
        self._bus = bus
        self._admission = admission
        self._model = model
        self._tasks = tasks
        self._replier = Replier(bus)
        self._others = OtherModels(bus, peers, model.name)
        settings = context.settings
        self._dispatcher = Dispatcher(bus, peers, router, monitor, admission, model.token)
        self._encoder = RequestEncoder(
            model, renderer, bus.max_payload, settings.seed, log_prompts=settings.log_prompts
        )
        self._processor = InputProcessor(
            model, settings.max_logprobs, self._encoder, self._dispatcher, self._replier, context.bus.store.now
        )
        self._subscriptions: list[Subscription] = []
        self._requests = 0

    @property
    def infos(self) -> tuple[ModelInfo, ...]:
        """Descriptions of the served model and its adapters, one per name."""
        return tuple(self._model.infos)

    @property
    def load(self) -> dict[str, float]:
        """Requests so far, requests dropped so far because their reply was no inbox, and the figures of admission."""
        return {"requests": self._requests, "dropped": self._replier.dropped, **self._admission.gauges}

    def metrics(self) -> Iterator[Sample]:
        """Yields the metrics of refusals and of admission."""
        yield from self._replier.metrics()
        yield from self._admission.metrics()

    async def subscribe(self) -> None:
        """Subscribes to the requests of clients."""
        handlers = {
            f"{subjects.GENERATE}.*": self._on_generate,
            f"{subjects.TOKENIZE}.*": self._on_tokenize,
            subjects.MODELS: self._on_models,
        }
        patterns: dict[str, Handler] = {}
        for subject, handler in handlers.items():
            patterns |= dict.fromkeys(subjects.for_everyone(subject), handler)
        for token in self._model.tokens:
            patterns[f"{subjects.FORWARD}.generate.{token}"] = passed_on(self._on_generate)
            patterns[f"{subjects.FORWARD}.tokenize.{token}"] = passed_on(self._on_tokenize)
        self._subscriptions = [
            await self._bus.subscribe(pattern, handler, queue=QUEUE) for pattern, handler in patterns.items()
        ]

    async def unsubscribe(self) -> None:
        """Leaves the queue group: returns when no further request can arrive."""
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    def stop(self) -> None:
        """Has new requests refused from now on, because the server is stopping."""
        self._dispatcher.stopping = True

    def _on_generate(self, message: Message) -> None:
        """`pagewire.v1.generate.<model>`."""
        if not self._admits(message):
            return
        refusal = None
        if self._admission.may_refuse:
            head = decode_head(message.data, encoding_of(message.headers))
            refusal = self._admission.refusal(head.priority, min(head.timeout_ms, MAX_TIMEOUT_MS) / 1000)
            # A request with an id of the client's choice may run already: then it joins its stream.
            if refusal is not None and (not head.request_id or FRESH in message.headers):
                self._replier.refuse(message, refusal, head=head)
                return
        self._start(message, self._processor.process(message, time.monotonic(), refusal))

    def _on_tokenize(self, message: Message) -> None:
        """`pagewire.v1.tokenize.<model>`."""
        if self._dispatcher.stopping and self._accepts(message):
            self._replier.refuse(message, Unavailable("the server is stopping: send the request again later"))
        elif self._admits(message):
            self._start(message, self._tokenize(message))

    def _on_models(self, message: Message) -> None:
        """`pagewire.v1.models`."""
        if self._accepts(message):
            tenant = subjects.tenant_of(message.subject)
            # Clients take the first one: whichever tokenizer answers, the order must be the same.
            infos = sorted([*self.infos, *self._others.infos()], key=lambda info: info.own_name)
            addressed = [replace(info, subject=subjects.for_tenant(info.subject, tenant)) for info in infos]
            self._replier.send(message, ModelList(addressed))

    async def _tokenize(self, message: Message) -> None:
        try:
            request = decode_request(message.data, TokenizeRequest, encoding_of(message.headers))
            reply = await self._encoder.tokenize(request)
        except RequestError as error:
            self._replier.refuse(message, error)
            return
        self._replier.send(message, reply)

    def _accepts(self, message: Message) -> bool:
        """Returns whether the request may be answered, and counts it if so."""
        accepted = self._replier.accepts(message.reply, subjects.tenant_of(message.subject))
        self._requests += accepted
        return accepted

    def _admits(self, message: Message) -> bool:
        """Returns whether a task may start for the request; refuses the request if not."""
        if not self._accepts(message):
            return False
        model = subjects.model_of(message.subject)
        if not self._model.serves(model):
            if (error := self._others.pass_on(message, model)) is not None:
                self._replier.refuse(message, error)
            return False
        if not self._tasks.has_room(len(message.data)):
            retry = self._admission.retry_after_ms(priority=0)
            busy = Overloaded("too many requests are arriving: send the request again later", retry)
            self._replier.refuse(message, busy)
            return False
        return True

    def _start(self, message: Message, work: Coroutine[Any, Any, None]) -> None:
        def failed(error: BaseException) -> None:
            _log.error("request_failed", exc_info=error)
            self._replier.refuse(message, Internal("the request met a fault of the server: its log has the details"))

        self._tasks.start(work, len(message.data), failed)
