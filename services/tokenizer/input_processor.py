"""The way of a generate request: checked, encoded, dispatched. Whatever refuses it on the way is told to the client."""

import secrets
from collections.abc import Callable

import structlog
from opentelemetry.trace import Span, format_trace_id

from pagewire.services.tokenizer.dispatch.dispatcher import Dispatcher, Outcome
from pagewire.services.tokenizer.dispatch.request_messages import request_messages
from pagewire.services.tokenizer.request_checker import check_request
from pagewire.services.tokenizer.request_encoder import RequestEncoder
from pagewire.services.tokenizer.served_model import Model
from pagewire.services.tokenizer.spans import describe, note
from pagewire.shared.bus import Message
from pagewire.shared.client_protocol.replies import Replier
from pagewire.shared.errors import Overloaded, RequestError
from pagewire.shared.telemetry import tracing

_log = structlog.get_logger()


class InputProcessor:
    """Takes the requests for one model through their three stages."""

    def __init__(
        self,
        model: Model,
        max_logprobs: int,
        encoder: RequestEncoder,
        dispatcher: Dispatcher,
        replier: Replier,
        now: Callable[[], float],
    ) -> None:
        """`max_logprobs`: maximum of log-probabilities per token that a request may ask for; `now`: the store's."""
        self._now = now
        self._model = model
        self._max_logprobs = max_logprobs
        self._encoder = encoder
        self._dispatcher = dispatcher
        self._replier = replier

    async def process(self, message: Message, arrived: float, refusal: Overloaded | None = None) -> None:
        """Dispatches a request, or tells the client why not. `arrived` is a monotonic time in seconds.

        With `refusal`, the request is served only if it is known, and else refused with that error.
        """
        drawn_id = secrets.token_hex(12)
        with tracing.tracer().start_as_current_span("receive", context=tracing.extract(message.headers)) as span:
            try:
                outcome = await self._process(span, message, drawn_id, arrived, refusal)
                note(span, outcome=outcome.value)
            except RequestError as error:
                note(span, request_id=self._replier.refuse(message, error, drawn_id), outcome=error.kind)
                tracing.fail(span, error)
            context = span.get_span_context()
            trace = {"trace_id": format_trace_id(context.trace_id)} if context.is_valid else {}
            _log.info("request", **trace)

    async def _process(
        self, span: Span, message: Message, drawn_id: str, arrived: float, refusal: Overloaded | None
    ) -> Outcome:
        checked = check_request(message, drawn_id, arrived, self._model, self._max_logprobs)
        note(span, request_id=checked.request_id)
        describe(span, checked.request, self._model.name)
        encoded = await self._encoder.encode(checked, span)
        headers: dict[str, str] = {}
        tracing.inject(headers, span)
        messages = request_messages(encoded, self._now(), checked.seconds_left(), headers)
        return await self._dispatcher.dispatch(messages, refusal)
