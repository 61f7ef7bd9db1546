"""The second stage of a request: its prompts become token ids, and its sampling parameters what the device takes."""

import asyncio
import hashlib
from collections.abc import Sequence

import msgspec
import structlog
from msgspec.structs import asdict, astuple, replace
from opentelemetry.trace import Span

from pagewire.services.tokenizer.answer_grammar import answer_grammar
from pagewire.services.tokenizer.chat.chat_template import Conversation
from pagewire.services.tokenizer.chat.renderer import ChatRenderer
from pagewire.services.tokenizer.chat.tool_use import Progress, chat_format, check_shown, progress_of
from pagewire.services.tokenizer.request_checker import TOO_LATE, CheckedRequest
from pagewire.services.tokenizer.served_model import Model
from pagewire.services.tokenizer.spans import note
from pagewire.services.tokenizer.validation import sampling_checks
from pagewire.services.tokenizer.validation.request_checks import (
    ChatPrompt,
    RequestLimits,
    TextPrompts,
    TokenPrompts,
    check_texts,
    check_tokens,
    prompts_of,
    tokens_to_generate,
    truncate,
)
from pagewire.shared.client_protocol.client_requests import unencodable
from pagewire.shared.errors import DeadlineExceeded
from pagewire.shared.messages.client import ChatFormat, GenerateRequest, SamplingParams
from pagewire.shared.messages.tokenize import TokenizeReply, TokenizeRequest
from pagewire.shared.messages.work import Sampling

LOGGED_CHARACTERS = 4096
"""Characters of each prompt that are logged, where the setting `log_prompts` says so."""

_canonical = msgspec.msgpack.Encoder(order="deterministic")


class EncodedRequest(msgspec.Struct, frozen=True):
    """A checked request in tokens."""

    checked: CheckedRequest
    prompts: Sequence[Sequence[int]]
    """Token ids of each prompt."""
    sampling: Sampling
    """Sampling parameters with all defaults filled in."""
    digest: bytes
    """Fingerprint of the body."""
    chat_format: ChatFormat | None = None
    """Format of the answers; None: they are texts without tool calls and reasoning."""
    skip_special: bool = True
    """Whether special tokens are left out of the texts: never those that `chat_format` needs."""


class RequestEncoder:
    """Encodes requests for one model."""

    def __init__(
        self, model: Model, renderer: ChatRenderer, max_payload: int, seed: int, *, log_prompts: bool = False
    ) -> None:
        """`seed`: the deployment's, from which the seeds of requests without one follow; 0: they are drawn.

        `log_prompts`: whether the log has the beginning of each prompt that is a text or a conversation.
        """
        self._model = model
        self._renderer = renderer
        self._seed = seed
        self._log_prompts = log_prompts
        self._limits = RequestLimits(
            model.max_model_len, model.vocab_size, max_payload, model.generation.max_new_tokens, model.longest_token
        )

    async def encode(self, checked: CheckedRequest, span: Span) -> EncodedRequest:
        """Encodes the prompts and all other texts of a request, and checks that its tokens fit.

        `span` is the request's: it says how long the prompts are, also when they are refused.

        Raises:
            RequestError: the deadline passes, the prompt does not fit, or a grammar cannot be compiled.
        """
        request, model = checked.request, self._model
        params = request.sampling
        try:
            async with asyncio.timeout(checked.seconds_left()):
                prompts, form, progress = await self._encode_prompts(checked)
                bad_words = await self._encode_bad_words(params)
                grammar = await answer_grammar(model.grammars, model.formats, request, form, progress)
        except TimeoutError as error:
            raise DeadlineExceeded(TOO_LATE) from error
        prompts = truncate(prompts, request.truncate_prompt_tokens, params, self._limits)
        note(span, prompt_tokens=sum(map(len, prompts)))
        lengths = check_tokens(prompts, self._limits)
        digest = digest_of(request, "" if checked.adapter is None else checked.adapter.name)
        sampling = sampling_checks.resolve(
            params,
            max_tokens=tokens_to_generate(
                lengths,
                params,
                self._limits,
                return_token_ids=request.return_token_ids,
                clamp=request.clamp_max_tokens,
            ),
            seed=sampling_checks.draw_seed(params, self._seed, digest, checked.request_id),
            eos=model.eos,
            vocab_size=model.vocab_size,
            bad_words=bad_words,
            grammar=grammar,
        )
        skip_special = params.skip_special_tokens and not (form is not None and model.formats.hides(form))
        return EncodedRequest(checked, prompts, sampling, digest, form, skip_special)

    async def tokenize(self, request: TokenizeRequest) -> TokenizeReply:
        """Returns the tokens of a text or of a conversation, however many.

        Raises:
            InvalidRequest: not exactly one of `text` and `messages`, or a field is invalid.
        """
        generate = generate_request_of(request)
        check_shown(generate, self._model.formats)
        match prompts_of(generate):
            case ChatPrompt(conversation):
                text, special = await self._render(conversation), bool(request.add_special_tokens)
            case _:
                text, special = request.text or "", request.add_special_tokens is not False
        (ids,) = await self._model.encoder.encode([text], special=special)
        return TokenizeReply(ids, self._model.encoder.spell(ids) if request.return_token_strs else None)

    async def _encode_prompts(
        self, checked: CheckedRequest
    ) -> tuple[Sequence[Sequence[int]], ChatFormat | None, Progress]:
        """Returns the ids of each prompt, and the format and the reasoning of the answers to a conversation."""
        request, encoder, formats = checked.request, self._model.encoder, self._model.formats
        special = request.add_special_tokens
        match checked.prompts:
            case TextPrompts(texts):
                self._check_texts(texts, request)
                return await encoder.encode(texts, special=special is not False), None, Progress.OVER
            case ChatPrompt(conversation):
                text = await self._render(conversation)
                self._check_texts([text], request)
                progress = progress_of(request, formats, text)
                prompts = await encoder.encode([text], special=bool(special))
                return prompts, chat_format(request, formats, progress), progress
            case TokenPrompts(prompts):
                return prompts, None, Progress.OVER

    async def _render(self, conversation: Conversation) -> str:
        conversation.tools_as_text = self._model.formats.tools_as_text
        return await self._renderer.render(conversation)

    def _check_texts(self, texts: Sequence[str], request: GenerateRequest) -> None:
        """Logs the prompts if they are to be logged, and refuses those that are too long to be encoded."""
        if self._log_prompts:
            structlog.contextvars.bind_contextvars(prompts=[text[:LOGGED_CHARACTERS] for text in texts])
        if request.truncate_prompt_tokens is None:  # otherwise a text of any length is of use
            check_texts(texts, self._limits)

    async def _encode_bad_words(self, params: SamplingParams) -> Sequence[Sequence[int]]:
        texts = sampling_checks.bad_word_texts(params)
        if not texts:
            return ()
        ids = await self._model.encoder.encode(texts, special=False)
        return sampling_checks.bad_word_ids(ids, self._model.vocab_size)


def generate_request_of(request: TokenizeRequest) -> GenerateRequest:
    """Returns a request to generate with the prompt of a request to tokenize."""
    return GenerateRequest(
        prompt=request.text,
        messages=request.messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template_kwargs=request.chat_template_kwargs,
        tools=request.tools,
    )


def digest_of(request: GenerateRequest, adapter: str = "") -> bytes:
    """Returns a fingerprint of the body and the name of its adapter: equal in either encoding, with any request id,
    streamed or not.

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
    return hashlib.sha256(body + adapter.encode()).digest()
