"""Decodes the body of `/v1/chat/completions`, including vLLM's extra fields."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from pagewire.services.gateway.requests.completion_request import TIMEOUT_MS, StreamOptions, Timeout
from pagewire.services.gateway.requests.sampling_fields import TokenLimit, converted, read_openai_fields, split_sampling
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.shared.client_protocol.client_requests import check_free_form
from pagewire.shared.errors import invalid_field
from pagewire.shared.messages.client import ChatMessage, ToolChoice


class ChatCompletionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields other than sampling parameters. Names and meaning are those of OpenAI, then of vLLM."""

    messages: list[ChatMessage]
    model: str = ""
    stream: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    user: str = ""
    cache_salt: str = ""
    request_id: str = ""
    priority: int = 0
    max_completion_tokens: TokenLimit | None = None
    """OpenAI's newer name for `max_tokens`, which it overrides."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """How much the model reasons, if its chat template reads `reasoning_effort` or `enable_thinking`; `none`: not."""
    use_beam_search: bool = False
    """Whether to do a beam search with `n` beams, all of which are returned."""
    logprobs: bool = False
    """Whether the log-probabilities of tokens are part of the answer."""
    top_logprobs: int = 0
    """Number of the likeliest tokens that are shown with each token; needs `logprobs`."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    """Whether the model may call tools, must call some, or must call a named one."""
    parallel_tool_calls: bool = True
    """Whether an answer may have more than one call."""
    include_reasoning: bool = True
    """Whether the reasoning is part of the answer."""
    echo: bool = False
    add_special_tokens: bool = False
    """Whether the prompt gets the special tokens that the model wants around one, beside those of the template."""
    truncate_prompt_tokens: int | None = None
    """Number of last tokens of the prompt that count; -1: as many as the context has room for."""
    return_token_ids: bool = False
    """Whether the ids of the prompt and of the answers are part of the answer."""
    return_token_origins: bool = False
    """Whether the events of a stream say if a token was sampled, drafted, or forced by a grammar."""
    timeout_ms: Timeout = TIMEOUT_MS
    """Milliseconds from the arrival until the request ends with an error; by default ten minutes."""


FIELDS = frozenset(ChatCompletionRequest.__struct_fields__)
_KIND = "chat completion request"
NOT_BUILT = ("echo",)
"""Unsupported fields, which are refused unless they are false."""


def decode(body: bytes, unknown: UnknownFields | None = None) -> tuple[ChatCompletionRequest, dict[str, Any]]:
    """Returns the request in a body, and the body's sampling fields. Without `max_tokens` the context is the limit.

    Raises:
        InvalidRequest: the body is malformed, or a field is of the wrong type or unsupported, or unknown and refused.
    """
    return of_fields(read_openai_fields(body, FIELDS, _KIND, unknown))


def of_fields(fields: dict[str, Any]) -> tuple[ChatCompletionRequest, dict[str, Any]]:
    """Returns the request with these fields, and its sampling fields; a field that is None counts as missing.

    Raises:
        InvalidRequest: a field is of the wrong type or unsupported.
    """
    own, sampling = split_sampling(fields, FIELDS)
    own |= _with_allowed_tools(own)
    request = converted(own, ChatCompletionRequest, _KIND)
    for message in request.messages:
        check_free_form("messages", message.tool_calls, "[].tool_calls")
    for name in NOT_BUILT:
        if getattr(request, name):
            raise invalid_field(name, "is not supported yet: leave it out")
    if request.use_beam_search:
        sampling["beam_width"] = sampling.get("n", 1)
    if request.top_logprobs and not request.logprobs:
        raise invalid_field("top_logprobs", "needs logprobs: set it to true")
    if request.logprobs:
        sampling["logprobs"] = request.top_logprobs
    if request.reasoning_effort is not None:
        request.chat_template_kwargs = effort_variables(request.reasoning_effort) | (request.chat_template_kwargs or {})
    newer = request.max_completion_tokens
    sampling["max_tokens"] = sampling.get("max_tokens") if newer is None else newer
    return request, sampling


def effort_variables(effort: str) -> dict[str, Any]:
    """Returns the template variables of an effort of reasoning; a template that reads none of them is not changed.

    >>> effort_variables("high"), effort_variables("none")
    ({'reasoning_effort': 'high'}, {'enable_thinking': False})
    """
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


def _with_allowed_tools(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `tools` and `tool_choice` for OpenAI's choice among some of the tools; empty without such a choice."""
    match fields.get("tool_choice"):
        case {"type": "allowed_tools", "allowed_tools": {"tools": list(allowed)} as choice}:
            names = [_function_name(tool) for tool in allowed]
            tools = fields.get("tools") or []
            if isinstance(tools, list):
                tools = [tool for tool in tools if _function_name(tool) in names]
            return {"tools": tools, "tool_choice": choice.get("mode", "auto")}
    return {}


def _function_name(tool: object) -> object:
    match tool:
        case {"function": {"name": name}}:
            return name
    return None
