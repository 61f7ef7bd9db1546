"""The response types of OpenAI's completions, chats and models."""

import time
from typing import Literal

import msgspec

from pagewire.shared.messages import client
from pagewire.shared.messages.request_metrics import Metrics, SpeculativeDecoding

TokenIds = list[int] | msgspec.UnsetType


class PromptDetails(msgspec.Struct):
    """Details of the prompt's tokens."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    """Details of the generated tokens."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Number of tokens that a request used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None
    """None until the request has ended."""
    completion_tokens_details: CompletionDetails | msgspec.UnsetType = msgspec.UNSET
    """Left out of an answer without reasoning."""


class Timings(msgspec.Struct):
    """Times of the parts of a request, in milliseconds, with llama.cpp's names. An unknown time is 0."""

    queue_ms: float
    """From the request's acceptance to the first step with a token of its prompts."""
    cache_n: int
    """Tokens of the prompts that were in the prefix cache."""
    prompt_n: int
    """Tokens of the prompts that were computed."""
    prompt_ms: float
    """From the first step with a token of the prompts to the first generated token."""
    prompt_per_token_ms: float
    prompt_per_second: float
    """Tokens of the prompts that were computed per second."""
    predicted_n: int
    """Generated tokens."""
    predicted_ms: float
    """From the first generated token to the end."""
    predicted_per_token_ms: float
    predicted_per_second: float
    """Generated tokens per second."""
    draft_n: int | msgspec.UnsetType = msgspec.UNSET
    """Drafted tokens; only if there were any."""
    draft_n_accepted: int | msgspec.UnsetType = msgspec.UNSET
    """Drafted tokens that were right."""


class AnswerMetrics(msgspec.Struct):
    """The figures of a request with vLLM's names, where the server is told to give them."""

    speculative_decoding: SpeculativeDecoding


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of tokens, as columns."""

    text_offset: list[int]
    """Where each token begins in the text, in characters."""
    token_logprobs: list[float | None]
    """None for the first token of an echoed prompt."""
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]
    """The likeliest tokens at each position, and the token itself."""


class TopLogprob(msgspec.Struct):
    """One of the likeliest tokens at a position of a message."""

    token: str
    logprob: float
    bytes: list[int]
    """UTF-8 of the token."""


class ChatTokenLogprob(msgspec.Struct):
    """A token of a message."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a message."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class TokenOrigin(msgspec.Struct):
    """How the token of an event came."""

    text: str
    """Text that the token adds, tags of reasoning and calls included."""
    origin: client.TokenOrigin


class CompletionChoice(msgspec.Struct):
    """A completion or, in a stream, the next part of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: client.PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    """vLLM's field; only if the request asks for it, and in a stream only in the first part."""
    token_ids: TokenIds = msgspec.UNSET
    """vLLM's field; only if the request asks for it."""
    prompt_token_ids: TokenIds = msgspec.UNSET
    """vLLM's field; only if the request asks for it, and in a stream only in the first part."""
    token_origin: TokenOrigin | msgspec.UnsetType = msgspec.UNSET
    """How the token came; only if the request asks for it, in an event of a stream."""


class Completion(msgspec.Struct):
    """The response to a completion request, or one event of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    object: Literal["text_completion"] = "text_completion"
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
    """Only beside the usage of a request that has ended."""
    metrics: AnswerMetrics | msgspec.UnsetType = msgspec.UNSET
    """Only there, too, and only with `--per-request-spec-decode-metrics`."""


class FunctionCall(msgspec.Struct, omit_defaults=True):
    """The function that is called, or in a stream the next part of its arguments."""

    arguments: str
    """JSON as the model has written it."""
    name: str | None = None
    """None in a stream after the first part."""


class ToolCall(msgspec.Struct):
    """A call of a tool."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """The next part of a call of a tool; the first one has all fields."""

    index: int
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class ChatMessage(msgspec.Struct):
    """The assistant's message."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    """Only if there is any; also as `reasoning_content`, its older name."""
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    """Only if there are any."""


class ChatChoice(msgspec.Struct):
    """An answer to a conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: TokenIds = msgspec.UNSET
    """vLLM's field; only if the request asks for it."""


class ChatCompletion(msgspec.Struct):
    """The answer to a chat completion request."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: client.PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    """vLLM's field; only if the request asks for it."""
    prompt_token_ids: TokenIds = msgspec.UNSET
    """vLLM's field; only if the request asks for it."""
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
    metrics: AnswerMetrics | msgspec.UnsetType = msgspec.UNSET
    """vLLM's field; only with `--per-request-spec-decode-metrics`."""


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """The next part of the assistant's message."""

    role: Literal["assistant"] | None = None
    """Only in the first event of a choice."""
    content: str | None = None
    reasoning: str | None = None
    """The next part of the reasoning; also as `reasoning_content`, its older name."""
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct):
    """The next part of an answer to a conversation."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: TokenIds = msgspec.UNSET
    """vLLM's field; only if the request asks for it."""
    token_origin: TokenOrigin | msgspec.UnsetType = msgspec.UNSET
    """How the token came; only if the request asks for it, in an event of a stream."""


class ChatChunk(msgspec.Struct):
    """One event of the stream of a chat completion request."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    prompt_logprobs: client.PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    """Only if the request asks for it, with the first token."""
    prompt_token_ids: TokenIds = msgspec.UNSET
    """vLLM's field; only if the request asks for it, in the first event of a choice."""
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
    """Only beside the usage of a request that has ended."""
    metrics: AnswerMetrics | msgspec.UnsetType = msgspec.UNSET
    """Only there, too, and only with `--per-request-spec-decode-metrics`."""


class Model(msgspec.Struct):
    """A served model."""

    id: str
    root: str
    """vLLM's field for the model's path, which its load generator reads; here the name, since paths stay private,
    or the hash of an adapter's content."""
    max_model_len: int
    parent: str | None = None
    """The model that an adapter changes; None: it is no adapter."""
    object: Literal["model"] = "model"
    created: int = int(time.time())
    owned_by: str = "pagewire"


class ModelList(msgspec.Struct):
    """The response of `/v1/models`."""

    data: list[Model]
    object: Literal["list"] = "list"


def usage_of(usage: client.Usage) -> Usage:
    """Converts the usage to OpenAI's format."""
    total = usage.prompt_tokens + usage.completion_tokens
    answer = Usage(usage.prompt_tokens, usage.completion_tokens, total, PromptDetails(usage.cached_tokens))
    if usage.reasoning_tokens:
        answer.completion_tokens_details = CompletionDetails(usage.reasoning_tokens)
    return answer


def timings_of(metrics: Metrics | None, usage: client.Usage) -> Timings | msgspec.UnsetType:
    """Converts the times of a request to llama.cpp's format."""
    if metrics is None:
        return msgspec.UNSET
    prompt, predicted = usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens
    prompt_ms, predicted_ms = 1e3 * (metrics.prefill_time or 0.0), 1e3 * (metrics.decode_time or 0.0)
    timings = Timings(
        queue_ms=1e3 * (metrics.queued_time or 0.0),
        cache_n=usage.cached_tokens,
        prompt_n=prompt,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=prompt_ms / max(prompt, 1),
        prompt_per_second=1e3 * prompt / prompt_ms if prompt_ms else 0.0,
        predicted_n=predicted,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=predicted_ms / max(predicted, 1),
        predicted_per_second=1e3 * predicted / predicted_ms if predicted_ms else 0.0,
    )
    if drafts := metrics.speculative_decoding:
        timings.draft_n, timings.draft_n_accepted = drafts.num_draft_tokens, drafts.num_accepted_draft_tokens
    return timings


def metrics_of(metrics: Metrics | None, choices: int, *, shown: bool) -> AnswerMetrics | msgspec.UnsetType:
    """Converts the figures of a request with so many choices to vLLM's format, which has those of a single one; unset
    unless `shown`."""
    drafts = msgspec.UNSET if metrics is None or choices > 1 or not shown else metrics.speculative_decoding
    return AnswerMetrics(drafts) if drafts else msgspec.UNSET


def origin_of(delta: client.Delta) -> TokenOrigin | msgspec.UnsetType:
    """Returns how the token of a delta came; unset: the request does not ask, or nobody knows."""
    return delta.origin if isinstance(delta.origin, msgspec.UnsetType) else TokenOrigin(delta.text, delta.origin)
