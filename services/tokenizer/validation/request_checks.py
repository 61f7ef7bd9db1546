"""Checks the fields of a request and, later, the lengths of its prompts. Pure, like `sampling_checks`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from pagewire.services.tokenizer.chat.chat_template import Conversation
from pagewire.services.tokenizer.chat.conversation import conversation_of
from pagewire.services.tokenizer.validation import sampling_checks
from pagewire.shared import subjects
from pagewire.shared.errors import ContextLength, ContextLengths, InvalidRequest, PayloadTooLarge, invalid_field
from pagewire.shared.messages.client import GenerateRequest, SamplingParams

MAX_TIMEOUT_MS = 24 * 3600 * 1000
"""Longest deadline of a request: a day."""
PRIORITIES = range(-(2**31), 2**31)
"""Priorities that a request may have: integers of 32 bits."""
MAX_USER = 256
"""Maximum characters of the user of a request."""
MAX_SALT = 256
"""Maximum characters of the cache salt of a request."""
MAX_PROMPTS = 256
"""Maximum prompts of a request."""
MAX_SEQUENCES = 256
"""Maximum completions, or beams, of all prompts of a request together."""
HEADROOM = 16 * 1024
"""Bytes left in every message for headers and for fields that do not grow with the tokens."""
SLOT_BYTES = 5
"""Bytes per token in a plan: the id, and its share of a block table."""
LOGPROB_BYTES = 100
"""Bytes per log-probability in a result in JSON, with the token's id and text."""
RESULT_BYTES = 24
"""Bytes per token in a result: a JSON id of 8 and text of 16. Ten languages need 5 to 11 together, escapes more."""


@dataclass(frozen=True, slots=True)
class TextPrompts:
    """Prompts as texts."""

    texts: Sequence[str]


@dataclass(frozen=True, slots=True)
class TokenPrompts:
    """Prompts as token ids."""

    prompts: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, which the chat template turns into one prompt."""

    conversation: Conversation


Prompts = TextPrompts | TokenPrompts | ChatPrompt
"""Prompts of a request in one of three forms."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of the model and of the bus."""

    max_model_len: int
    """Maximum tokens of a prompt and one of its completions together."""
    vocab_size: int
    """Number of token ids, which begin at 0."""
    max_payload: int
    """Maximum bytes of a message."""
    max_new_tokens: int | None = None
    """Tokens to generate for a request that names no number; None: as many as the context leaves."""
    longest_token: int = 1024
    """Number of characters of the longest token."""


def validate(request: GenerateRequest, vocab_size: int, max_logprobs: int = 20) -> Prompts:
    """Checks every field, and returns the prompts. `max_logprobs` is the deployment's.

    Raises:
        InvalidRequest: a field is invalid; the message names it and its range.
    """
    if request.request_id is not None and not subjects.is_token(request.request_id):
        raise invalid_field("request_id", "must have 1 to 64 characters out of A-Z, a-z, 0-9, _ and -")
    if not 1 <= request.timeout_ms <= MAX_TIMEOUT_MS:
        raise invalid_field("timeout_ms", f"must be between 1 and {MAX_TIMEOUT_MS}, not {request.timeout_ms}")
    if request.priority not in PRIORITIES:
        raise invalid_field("priority", f"must be an integer of 32 bits, not {request.priority}")
    if len(request.user) > MAX_USER:
        raise invalid_field("user", f"must have at most {MAX_USER} characters, not {len(request.user)}")
    if len(request.cache_salt) > MAX_SALT:
        raise invalid_field("cache_salt", f"must have at most {MAX_SALT} characters, not {len(request.cache_salt)}")
    sampling_checks.check(request.sampling, vocab_size, max_logprobs)
    if request.stream and sampling_checks.num_sequences(request.sampling) > request.sampling.n:
        raise invalid_field("best_of", "is not for streams, because the best is known at the end: leave out stream")
    truncated = request.truncate_prompt_tokens
    if truncated is not None and truncated != -1 and truncated < 1:
        raise invalid_field("truncate_prompt_tokens", f"must be at least 1, or -1, not {truncated}")
    return prompts_of(request)


def prompts_of(request: GenerateRequest) -> Prompts:
    """Returns the prompts of a request.

    Raises:
        InvalidRequest: it has not exactly one of `prompt` and `messages`, or that is empty, mixed or too long.
    """
    prompt, messages = request.prompt, request.messages
    if messages is not None and prompt is None:
        return ChatPrompt(conversation_of(request, messages))
    if prompt is None or messages is not None:
        raise InvalidRequest("give exactly one of prompt and messages")
    if isinstance(prompt, str):
        return TextPrompts([prompt])
    if not prompt:
        raise invalid_field("prompt", "is empty: give text, token ids, or several of either")
    if _all_ids(prompt):
        return TokenPrompts([prompt])
    return _batch(prompt)


def check_texts(texts: Sequence[str], limits: RequestLimits) -> None:
    """Checks that no text is longer than a context full of the longest token: encoding it would be in vain.

    Raises:
        ContextLength: a text is too long.
    """
    longest, room = max(map(len, texts)), limits.max_model_len * limits.longest_token
    if longest > room:
        raise ContextLength(
            f"the prompt has {longest} characters, more than {room}, the most that the context of "
            f"{limits.max_model_len} tokens can hold: shorten the prompt",
            lengths=ContextLengths(-(-longest // limits.longest_token), 0, limits.max_model_len),
        )


def truncate(
    prompts: Sequence[Sequence[int]], tokens: int | None, params: SamplingParams, limits: RequestLimits
) -> Sequence[Sequence[int]]:
    """Returns the last `tokens` ids of each prompt: None keeps all, -1 as many as leave room for `max_tokens`.

    Raises:
        InvalidRequest: the context does not hold `tokens`.
    """
    if tokens is None:
        return prompts
    if tokens > limits.max_model_len:
        raise invalid_field(
            "truncate_prompt_tokens",
            f"is {tokens}, more than the context of {limits.max_model_len} tokens: set it lower",
        )
    length = max(1, limits.max_model_len - (params.max_tokens or 1)) if tokens == -1 else tokens
    return [prompt[-length:] for prompt in prompts]


def check_tokens(prompts: Sequence[Sequence[int]], limits: RequestLimits) -> list[int]:
    """Returns the lengths of all prompts, whose token ids the model has and which leave room in the context.

    Raises:
        ContextLength: a prompt fills the context.
        InvalidRequest: a prompt has no token, or one that the model does not have.
    """
    lengths = list(map(len, prompts))
    longest = max(lengths)
    if longest >= limits.max_model_len:
        raise ContextLength(
            f"the prompt has {longest} tokens and the context {limits.max_model_len}, of which one must be left to "
            "generate: shorten the prompt",
            lengths=ContextLengths(longest, 0, limits.max_model_len),
        )
    check_ids(prompts, limits.vocab_size)
    return lengths


def check_ids(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Checks that every prompt has tokens, and that the model has these tokens.

    Raises:
        InvalidRequest: a prompt has none, or an unknown one; the message says which.
    """
    for index, ids in enumerate(prompts):
        if not ids:
            raise invalid_field("prompt", f"{index} is empty: give at least one token")
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocab_size:
            token = low if low < 0 else high
            raise invalid_field("prompt", f"{index} has token {token}, outside the vocabulary of {vocab_size} tokens")


def tokens_to_generate(
    prompt_lengths: Sequence[int],
    params: SamplingParams,
    limits: RequestLimits,
    *,
    return_token_ids: bool = False,
    clamp: bool = False,
) -> int:
    """Returns the resolved `max_tokens` of a request whose prompts `check_tokens` has checked.

    Raises:
        InvalidRequest: there are too many completions, or `min_tokens` exceeds the context.
        ContextLength: `max_tokens` does not fit behind a prompt, and is not to be clamped.
        PayloadTooLarge: the work or the result could not fit into a message.
    """
    sequences = len(prompt_lengths) * sampling_checks.num_sequences(params)
    running = max(sequences, len(prompt_lengths) * (params.beam_width or 0))
    if running > MAX_SEQUENCES:
        raise InvalidRequest(
            f"the request asks for {running} completions or beams, at most {MAX_SEQUENCES} are allowed"
        )
    longest = max(prompt_lengths)
    room = limits.max_model_len - longest
    default = min(room, limits.max_new_tokens or room)
    max_tokens = default if params.max_tokens is None else params.max_tokens
    if clamp:
        max_tokens = min(max_tokens, room)
    if max_tokens > room:
        raise ContextLength(
            f"the prompt has {longest} tokens and max_tokens is {max_tokens}, the context has {limits.max_model_len}: "
            f"shorten the prompt or set max_tokens to at most {room}",
            lengths=ContextLengths(longest, max_tokens, limits.max_model_len),
        )
    if params.min_tokens > max_tokens:
        raise invalid_field(
            "min_tokens", f"{params.min_tokens} exceeds the {max_tokens} tokens that the context leaves"
        )
    id_bytes = RESULT_BYTES * sum(prompt_lengths) if return_token_ids else 0
    _check_payload(prompt_lengths, sequences, max_tokens, params, limits, id_bytes)
    return max_tokens


def _check_payload(
    prompt_lengths: Sequence[int],
    sequences: int,
    max_tokens: int,
    params: SamplingParams,
    limits: RequestLimits,
    id_bytes: int,
) -> None:
    """Checks that the work, the plan and the result fit into messages. The result has `id_bytes` of prompts' ids."""
    max_payload = limits.max_payload
    room = max_payload - HEADROOM
    work = 4 * sum(prompt_lengths)
    slot = SLOT_BYTES * (max(prompt_lengths) + max_tokens)
    if max(work, slot) > room:
        raise PayloadTooLarge(
            f"the request needs messages of {max(work, slot) + HEADROOM} bytes, the broker takes {max_payload}: "
            "send fewer or shorter prompts"
        )
    prompts = id_bytes
    per_prompt_token = sampling_checks.num_logprobs(params.prompt_logprobs, limits.vocab_size)
    if per_prompt_token is not None:
        prompts += sum(prompt_lengths) * (SLOT_BYTES + LOGPROB_BYTES * (per_prompt_token + 1))
        if prompts > room:
            raise PayloadTooLarge(
                f"prompt_logprobs could need a message of {prompts + HEADROOM} bytes, the broker takes {max_payload}: "
                "send fewer or shorter prompts, or ask for fewer log-probabilities"
            )
    logprobs = sampling_checks.num_logprobs(params.logprobs, limits.vocab_size)
    token_bytes = RESULT_BYTES + (0 if logprobs is None else LOGPROB_BYTES * (logprobs + 1))
    result = token_bytes * sequences * max_tokens + prompts
    if result > room:
        raise PayloadTooLarge(
            f"the result could need a message of {result + HEADROOM} bytes, the broker takes {max_payload}: "
            f"set max_tokens to at most {max((room - prompts) // (token_bytes * sequences), 0)}, "
            "or ask for fewer completions"
        )


def _batch(prompts: Sequence[int | str | Sequence[int]]) -> TextPrompts | TokenPrompts:
    if len(prompts) > MAX_PROMPTS:
        raise invalid_field("prompt", f"has {len(prompts)} prompts, at most {MAX_PROMPTS} fit into one request")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) == len(prompts):
        return TextPrompts(texts)
    ids = [prompt for prompt in prompts if not isinstance(prompt, str | int)]
    if len(ids) == len(prompts):
        return TokenPrompts(ids)
    raise invalid_field("prompt", "has several kinds: give either texts or lists of token ids")


def _all_ids(prompt: Sequence[int | str | Sequence[int]]) -> TypeGuard[Sequence[int]]:
    return set(map(type, prompt)) == {int}  # in C: a prompt of millions is refused by its length later
