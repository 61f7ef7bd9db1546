"""From the bytes of a generate request to the two messages that dispatch it."""

import asyncio
import hashlib
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import structlog
from msgspec.structs import asdict, astuple, replace
from opentelemetry.trace import Span, format_trace_id

from pagewire.services.tokenizer.chat.reasoning_grammar import reasoning_grammar
from pagewire.services.tokenizer.chat.renderer import ChatRenderer
from pagewire.services.tokenizer.chat.tool_use import (
    chat_format,
    check_shown,
    check_tools,
    progress_of,
    with_forced_call,
)
from pagewire.services.tokenizer.dispatch.dispatcher import Dispatcher, Outcome
from pagewire.services.tokenizer.served_model import Model
from pagewire.services.tokenizer.spans import describe
from pagewire.services.tokenizer.validation import sampling_checks
from pagewire.services.tokenizer.validation.request_checks import (
    ChatPrompt,
    RequestLimits,
    TextPrompts,
    TokenPrompts,
    check_ids,
    check_lengths,
    check_texts,
    prompts_of,
    tokens_to_generate,
    truncate,
    validate,
)
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.client_protocol.client_requests import decode_request, encoding_of, unencodable
from pagewire.shared.client_protocol.replies import Replier
from pagewire.shared.errors import DeadlineExceeded, Overloaded, RequestError
from pagewire.shared.messages import pack
from pagewire.shared.messages.client import BATCH_INBOX, FRESH, ChatFormat, GenerateRequest, SamplingParams
from pagewire.shared.messages.open import Encoding, OpenStream
from pagewire.shared.messages.tokenize import TokenizeReply, TokenizeRequest
from pagewire.shared.messages.work import Sampling, WorkItem
from pagewire.shared.telemetry import tracing

PROMPT_TAIL = 16
"""Ids of each prompt that the detokenizer gets: the first text behind a prompt can depend on a few of them."""
LOGGED_CHARACTERS = 4096
"""Characters of each prompt that are logged, where the setting `log_prompts` says so."""
SECRET_BYTES = 16
"""Random bytes at the end of the subjects that cancel and resume a stream."""

_log = structlog.get_logger()
_canonical = msgspec.msgpack.Encoder(order="deterministic")
_TOO_LATE = "timeout_ms passed before the request was tokenized: allow more time"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, and until when the result is wanted."""

    request_id: str
    reply: str
    """The client's inbox."""
    encoding: Encoding
    deadline: float
    """Unix time in seconds."""
    fresh: bool
    """Whether the id was drawn for this very message."""
    batch_inbox: str
    """The inbox where the client's connection takes deltas of several streams; empty: there is none."""
    tenant: str = ""
    """Empty for a client that is no tenant."""
    secret: bytes = b""
    """Random bytes that only this client learns."""


class InputProcessor:
    """Validates, tokenizes and dispatches the requests for one model."""

    def __init__(
        self,
        model: Model,
        renderer: ChatRenderer,
        dispatcher: Dispatcher,
        replier: Replier,
        max_payload: int,
        seed: int,
        max_logprobs: int = 20,
        *,
        log_prompts: bool = False,
    ) -> None:
        """`seed`: of the deployment. The seeds of requests without one follow from it; 0: they are drawn.

        `max_logprobs`: most log-probabilities per token that a request may ask for. `log_prompts`: whether the log has
        the beginning of each prompt that is a text or a conversation.
        """
        self._log_prompts = log_prompts
        self._max_logprobs = max_logprobs
        self._model = model
        self._renderer = renderer
        self._dispatcher = dispatcher
        self._replier = replier
        self._limits = RequestLimits(
            model.max_model_len, model.vocab_size, max_payload, model.generation.max_new_tokens, model.longest_token
        )
        self._seed = seed

    async def tokenize(self, request: TokenizeRequest) -> TokenizeReply:
        """Returns the tokens of a text or of a conversation, however many.

        Raises:
            InvalidRequest: not exactly one of `text` and `messages`, or a field is invalid.
        """
        special, asked = request.add_special_tokens, generate_request_of(request)
        check_shown(asked, self._model.formats)
        match prompts_of(asked):
            case ChatPrompt(conversation):
                text, special = await self._renderer.render(conversation), bool(special)
            case _:
                text, special = request.text or "", special is not False
        (ids,) = await self._model.encoder.encode([text], special=special)
        return TokenizeReply(ids, self._model.encoder.spell(ids) if request.return_token_strs else None)

    async def process(self, message: Message, arrived: float, refusal: Overloaded | None = None) -> None:
        """Dispatches a request, or tells the client why not. `arrived` is a monotonic time in seconds.

        With `refusal`, the request is served only if it is known, and else refused with that error.
        """
        drawn_id = secrets.token_hex(12)
        with tracing.tracer().start_as_current_span("receive", context=tracing.extract(message.headers)) as span:
            _note(span, request_id=drawn_id)
            try:
                outcome = await self._process(message, arrived, drawn_id, span, refusal)
                _note(span, outcome=outcome.value)
            except RequestError as error:
                request_id = self._replier.refuse(message, error, drawn_id)
                _note(span, request_id=request_id, outcome=error.kind)
                tracing.fail(span, error)
            context = span.get_span_context()
            trace = {"trace_id": format_trace_id(context.trace_id)} if context.is_valid else {}
            _log.info("request", **trace)

    async def _process(
        self, message: Message, arrived: float, drawn_id: str, span: Span, refusal: Overloaded | None
    ) -> Outcome:
        encoding = encoding_of(message.headers)
        request = decode_request(message.data, GenerateRequest, encoding)
        request.sampling = self._model.generation.complete(request.sampling, message.data, encoding)
        check_tools(request, self._model.formats)
        request.sampling = with_forced_call(request)
        prompt = validate(request, self._model.vocab_size, self._max_logprobs)
        request_id = request.request_id or drawn_id
        _note(span, request_id=request_id)
        describe(span, request, self._model.names[0])
        expires = arrived + request.timeout_ms / 1000
        try:
            async with asyncio.timeout(_seconds_left(expires)):
                ids, form, reasoning = await self._tokenize(request, prompt)
                words = await self._bad_words(request.sampling)
                grammar = await self._model.grammars.grammar(request.sampling.structured_outputs, reasoning)
        except TimeoutError as error:
            raise DeadlineExceeded(_TOO_LATE) from error
        ids = truncate(ids, request.truncate_prompt_tokens, request.sampling, self._limits)
        lengths = list(map(len, ids))
        _note(span, prompt_tokens=sum(lengths))
        check_lengths(lengths, self._limits)  # before anything looks at each id
        check_ids(ids, self._model.vocab_size)
        digest = digest_of(request)
        resolved = sampling_checks.resolve(
            request.sampling,
            seed=sampling_checks.draw_seed(request.sampling, self._seed, digest),
            max_tokens=tokens_to_generate(
                lengths, request.sampling, self._limits, return_token_ids=request.return_token_ids
            ),
            eos=self._model.eos,
            vocab_size=self._model.vocab_size,
            bad_words=words,
            grammar=grammar,
        )
        left = _seconds_left(expires)
        batch_inbox = message.headers.get(BATCH_INBOX, "")
        tenant = subjects.tenant_of(message.subject)
        caller = Caller(
            request_id,
            message.reply,
            encoding,
            deadline=time.time() + left,
            fresh=not request.request_id or FRESH in message.headers,
            batch_inbox=batch_inbox if subjects.owner_of(batch_inbox) == tenant else "",
            tenant=tenant,
            secret=secrets.token_bytes(SECRET_BYTES),
        )
        headers: dict[str, str] = {}
        tracing.inject(headers, span)
        return await self._dispatcher.dispatch(
            self._open_stream(request, caller, ids, digest, math.ceil(left * 1000), form),
            work_item(request, caller, ids, resolved),
            headers,
            refusal,
        )

    def _open_stream(
        self,
        request: GenerateRequest,
        caller: Caller,
        prompts: Sequence[Sequence[int]],
        digest: bytes,
        timeout_ms: int,
        form: ChatFormat | None,
    ) -> OpenStream:
        opening = open_stream(request, caller, prompts, digest, timeout_ms)
        if form is None:
            return opening
        skips = opening.skip_special and not self._model.formats.hides(form)
        return replace(opening, chat_format=form, skip_special=skips)

    async def _tokenize(
        self, request: GenerateRequest, prompt: TextPrompts | TokenPrompts | ChatPrompt
    ) -> tuple[Sequence[Sequence[int]], ChatFormat | None, str]:
        """Returns the ids of each prompt, how the answers to a conversation become messages, and the grammar of what
        they may say before the text that the request asks for."""
        special = request.add_special_tokens
        whole = request.truncate_prompt_tokens is None  # otherwise a text of any length is of use
        match prompt:
            case TextPrompts(texts):
                self._log(texts)
                if whole:
                    check_texts(texts, self._limits)
                return await self._model.encoder.encode(texts, special=special is not False), None, ""
            case ChatPrompt(conversation):
                text = await self._renderer.render(conversation)
                self._log([text])
                if whole:
                    check_texts([text], self._limits)
                formats = self._model.formats
                form, progress = chat_format(request, formats, text), progress_of(request, formats, text)
                reasoning = reasoning_grammar(formats.reasoning, progress, formats.token_ids)
                return await self._model.encoder.encode([text], special=bool(special)), form, reasoning
            case TokenPrompts(prompts):
                return prompts, None, ""

    def _log(self, texts: Sequence[str]) -> None:
        """Adds the prompts to the log line of the request, if they are to be logged."""
        if self._log_prompts:
            structlog.contextvars.bind_contextvars(prompts=[text[:LOGGED_CHARACTERS] for text in texts])

    async def _bad_words(self, params: SamplingParams) -> Sequence[Sequence[int]]:
        texts = sampling_checks.bad_word_texts(params)
        if not texts:
            return ()
        return sampling_checks.bad_word_ids(await self._model.encoder.encode(texts, special=False))


def generate_request_of(request: TokenizeRequest) -> GenerateRequest:
    """Returns a request with the prompt whose tokens are asked for."""
    return GenerateRequest(
        prompt=request.text,
        messages=request.messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template_kwargs=request.chat_template_kwargs,
        tools=request.tools,
    )


def digest_of(request: GenerateRequest) -> bytes:
    """Returns a fingerprint of the body: equal in either encoding, with any request id, streamed or not.

    Raises:
        InvalidRequest: a field cannot be encoded; the message names it.
    """
    params, biases = request.sampling, None
    if params.logit_bias is not None:  # the encoder sorts keys that are texts only
        biases = sorted(params.logit_bias.items())
        params = replace(params, logit_bias=None)
    anonymous = replace(request, request_id=None, stream=False, sampling=params)
    try:
        # This struct leaves out defaults by identity, not by value, when it is encoded: a tuple leaves out nothing.
        body = _canonical.encode((astuple(anonymous), biases))
    except (OverflowError, RecursionError) as error:
        raise unencodable(asdict(anonymous), _canonical) from error
    return hashlib.sha256(body).digest()


def open_stream(
    request: GenerateRequest, caller: Caller, prompts: Sequence[Sequence[int]], digest: bytes, timeout_ms: int
) -> OpenStream:
    """Returns the message to the detokenizer."""
    params = request.sampling
    tail = 0 if params.prompt_logprobs is not None or request.return_token_ids else -PROMPT_TAIL
    sequences = sampling_checks.num_sequences(params)
    return OpenStream(
        request_id=subjects.owned(caller.tenant, caller.request_id),
        digest=digest,
        reply=caller.reply,
        encoding=caller.encoding,
        stream=request.stream,
        prompts=tuple(pack(ids[tail:]) for ids in prompts),
        prompt_lengths=pack(map(len, prompts)),
        n=sequences,
        stop=sampling_checks.stop_strings(params),
        stop_token_ids=sampling_checks.stop_tokens(params),
        include_stop=params.include_stop_str_in_output,
        skip_special=params.skip_special_tokens,
        min_tokens=params.min_tokens,
        timeout_ms=timeout_ms,
        fresh=caller.fresh,
        batch_inbox=caller.batch_inbox,
        deadline=caller.deadline,
        secret=caller.secret,
        logprobs=params.logprobs is not None or sequences > params.n,
        prompt_logprobs=params.prompt_logprobs is not None,
        best=params.n if sequences > params.n else 0,
        hides_logprobs=params.logprobs is None and sequences > params.n,
        return_token_ids=request.return_token_ids,
    )


def work_item(
    request: GenerateRequest, caller: Caller, prompts: Sequence[Sequence[int]], resolved: Sampling
) -> WorkItem:
    """Returns the message to the scheduler. The dispatcher fills in the detokenizer that has opened the stream."""
    return WorkItem(
        request_id=subjects.owned(caller.tenant, caller.request_id),
        detokenizer="",
        prompts=tuple(map(pack, prompts)),
        n=sampling_checks.num_sequences(request.sampling),
        sampling=resolved,
        priority=request.priority,
        deadline=caller.deadline,
        user=subjects.owned(caller.tenant, request.user),
        cache_salt=subjects.owned(caller.tenant, request.cache_salt),
    )


def _seconds_left(expires: float) -> float:
    """Returns the seconds until a monotonic time, more than 0.

    Raises:
        DeadlineExceeded: the time has passed.
    """
    left = expires - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded(_TOO_LATE)
    return left


def _note(span: Span, **values: str | int) -> None:
    """Adds what is known of the request to its span and to its log line."""
    span.set_attributes(values)
    structlog.contextvars.bind_contextvars(**values)
