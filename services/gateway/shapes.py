"""The response types of OpenAI's completions API."""

import time
from typing import Literal

import msgspec

from pagewire.shared.messages import client


class PromptDetails(msgspec.Struct):
    """Details of the prompt's tokens."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Number of tokens that a request used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None
    """None until the request has ended."""


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


class Choice(msgspec.Struct):
    """A completion or, in a stream, the next part of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: client.PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    """vLLM's field; only if the request asks for it."""


class Completion(msgspec.Struct):
    """The response to a completion request, or one event of its stream."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    object: Literal["text_completion"] = "text_completion"


class FunctionCall(msgspec.Struct, omit_defaults=True):
    """Which function is called, or in a stream the next part of that."""

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
    """If there is any; also as `reasoning_content`, its older name."""
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    """If there are any."""


class ChatChoice(msgspec.Struct):
    """An answer to a conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


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


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """The next part of the assistant's message."""

    role: Literal["assistant"] | None = None
    """Only in the first event of a choice."""
    content: str | None = None
    reasoning: str | None = None
    """Also as `reasoning_content`, its older name."""
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct):
    """The next part of an answer to a conversation."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatChunk(msgspec.Struct):
    """One event of the stream of a chat completion request."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class Model(msgspec.Struct):
    """A served model."""

    id: str
    root: str
    """vLLM's field for the model's path, which its load generator reads; here the name, since paths stay private."""
    max_model_len: int
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
    return Usage(usage.prompt_tokens, usage.completion_tokens, total, PromptDetails(usage.cached_tokens))
