"""One generate request, from its bytes to the moment when a detokenizer has it."""

import asyncio
import math
import secrets
import time
from collections.abc import Sequence

import structlog
from opentelemetry.trace import Span, format_trace_id

from pagewire.services.tokenizer import sampling
from pagewire.services.tokenizer.answers import Answers
from pagewire.services.tokenizer.assemble import Caller, digest_of, open_stream, work_item
from pagewire.services.tokenizer.chat.renderer import ChatRenderer
from pagewire.services.tokenizer.decode import decode, encoding_of
from pagewire.services.tokenizer.handover import Handover, Outcome
from pagewire.services.tokenizer.limits import Limits, tokens_to_generate
from pagewire.services.tokenizer.model import Model
from pagewire.services.tokenizer.prompts import Chat, Ids, Texts, check_ids
from pagewire.services.tokenizer.replicas import Replicas
from pagewire.services.tokenizer.validate import validate
from pagewire.shared import subjects, telemetry
from pagewire.shared.bus import Bus, Message
from pagewire.shared.errors import DeadlineExceeded, RequestError
from pagewire.shared.messages.client import BATCH_INBOX, FRESH, GenerateRequest
from pagewire.shared.peers import Peers

_log = structlog.get_logger()
_TOO_LATE = "timeout_ms passed before the request was tokenized: allow more time"


class Generate:
    """Checks, tokenizes and hands over the requests for one model."""

    def __init__(
        self, bus: Bus, peers: Peers, replicas: Replicas, model: Model, renderer: ChatRenderer, seed: int
    ) -> None:
        """`seed` is the deployment's: requests without a seed get one that follows from it; 0: theirs are drawn."""
        self._model = model
        self._renderer = renderer
        self._seed = seed
        self._limits = Limits(model.max_model_len, model.vocab_size, bus.max_payload, model.generation.max_new_tokens)
        self._handover = Handover(bus, peers, replicas, model.token)
        self._answers = Answers(bus)

    async def serve(self, message: Message, arrived: float) -> None:
        """Hands the request over, or tells the client why not. `arrived` is a monotonic time."""
        drawn_id = secrets.token_hex(12)
        with telemetry.tracer().start_as_current_span("receive", context=telemetry.extract(message.headers)) as span:
            _note(span, request_id=drawn_id)
            try:
                outcome = await self._hand_over(message, arrived, drawn_id, span)
                _note(span, outcome=outcome.value)
            except RequestError as error:
                request_id = self._answers.refuse(message, error, drawn_id)
                _note(span, request_id=request_id, outcome=error.kind)
            context = span.get_span_context()
            trace = {"trace_id": format_trace_id(context.trace_id)} if context.is_valid else {}
            _log.info("request", **trace)

    async def _hand_over(self, message: Message, arrived: float, drawn_id: str, span: Span) -> Outcome:
        encoding = encoding_of(message.headers)
        request = decode(message.data, GenerateRequest, encoding)
        request.sampling = self._model.generation.complete(request.sampling, message.data, encoding)
        asked = validate(request, self._model.vocab_size)
        request_id = request.request_id or drawn_id
        _note(span, request_id=request_id)
        expires = arrived + request.timeout_ms / 1000
        try:
            async with asyncio.timeout(_left(expires)):
                prompts = await self._tokenize(asked)
        except TimeoutError as error:
            raise DeadlineExceeded(_TOO_LATE) from error
        check_ids(prompts, self._model.vocab_size)
        lengths = [len(ids) for ids in prompts]
        _note(span, prompt_tokens=sum(lengths))
        digest = digest_of(request)
        chosen = sampling.resolve(
            request.sampling,
            seed=sampling.draw_seed(request.sampling, self._seed, digest),
            max_tokens=tokens_to_generate(lengths, request.sampling, self._limits),
            eos=self._model.eos,
            vocab_size=self._model.vocab_size,
        )
        left = _left(expires)
        fresh = not request.request_id or FRESH in message.headers
        batch_inbox = message.headers.get(BATCH_INBOX, "")
        caller = Caller(
            request_id,
            message.reply,
            encoding,
            deadline=time.time() + left,
            fresh=fresh,
            batch_inbox=batch_inbox if subjects.is_client_inbox(batch_inbox) else "",
        )
        headers: dict[str, str] = {}
        telemetry.inject(headers, span)
        return await self._handover.deliver(
            open_stream(request, caller, prompts, digest, timeout_ms=math.ceil(left * 1000)),
            work_item(request, caller, prompts, chosen),
            headers,
        )

    async def _tokenize(self, asked: Texts | Ids | Chat) -> Sequence[Sequence[int]]:
        match asked:
            case Texts(texts):
                return await self._model.encoder.encode(texts)
            case Chat(conversation):
                text = await self._renderer.render(conversation)
                return await self._model.encoder.encode([text], special=False)
            case Ids(prompts):
                return prompts


def _left(expires: float) -> float:
    """Seconds until a monotonic time, more than 0."""
    left = expires - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded(_TOO_LATE)
    return left


def _note(span: Span, **values: str | int) -> None:
    """Puts what is now known of the request on its span and on its log line."""
    span.set_attributes(values)
    structlog.contextvars.bind_contextvars(**values)
