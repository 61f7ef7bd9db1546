"""Decodes the bodies of OpenAI's `/v1/responses` into fields of a chat."""

from typing import Any, Literal

import msgspec

from pagewire.services.gateway.requests.sampling_fields import TokenLimit, converted, read_fields
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.shared.errors import invalid_field
from pagewire.shared.messages.client import SamplingParams


class TextOptions(msgspec.Struct):
    """The form of the answer's text."""

    format: dict[str, Any] | None = None
    """OpenAI's `response_format` of a chat, without the level `json_schema`."""
    verbosity: Literal["medium"] | None = None


class Reasoning(msgspec.Struct):
    """The reasoning before the answer."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """OpenAI's fields."""

    input: str | list[dict[str, Any]]
    model: str = ""
    instructions: str | None = None
    max_output_tokens: TokenLimit | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions = msgspec.field(default_factory=TextOptions)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    request_id: str | None = None
    priority: int | None = None


FIELDS = frozenset(ResponsesRequest.__struct_fields__)
IGNORED = frozenset(
    """include max_tool_calls moderation prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier
    service_tier store stream_options top_logprobs""".split()  # noqa: SIM905
)
"""Fields that OpenAI documents and that have no meaning here: nothing is stored."""
NEUTRAL = {"background": False, "truncation": "disabled"}
"""Fields that are refused with any other value than this."""
STATEFUL = frozenset({"conversation", "previous_input_messages", "previous_response_id", "prompt"})
"""Fields that name a stored response."""
_REFUSED = frozenset({"beam_width", "best_of", "length_penalty", "logprobs", "max_tokens", "n", "prompt_logprobs"})
"""Sampling fields whose results have no place in an answer of this route, or that have another name here."""
PASSED = frozenset(SamplingParams.__struct_fields__) - FIELDS - _REFUSED | {
    "cache_salt",
    "chat_template_kwargs",
    "include_reasoning",
}
"""Fields of vLLM's that have the same meaning as in a chat."""
FREE_FORM = frozenset({"input", "tools", "text", "tool_choice"})
"""Fields whose values may have any form."""


def decode(body: bytes, unknown: UnknownFields) -> tuple[ResponsesRequest, dict[str, Any]]:
    """Returns the request in a body, and its fields of `PASSED`, which are not checked.

    Raises:
        InvalidRequest: the body is malformed, or a field is of the wrong type or unsupported.
    """
    names = FIELDS | IGNORED | STATEFUL | PASSED | NEUTRAL.keys()
    fields = read_fields(body, names, "responses request", unknown, free_form=FREE_FORM)
    for name in fields.keys() & STATEFUL:
        raise invalid_field(name, "is not supported, since nothing is stored: send the whole conversation as input")
    for name in fields.keys() & NEUTRAL.keys():
        if fields[name] != NEUTRAL[name]:
            raise invalid_field(name, "is not supported yet: leave it out")
    passed = {name: fields.pop(name) for name in PASSED & fields.keys()}
    return converted(fields, ResponsesRequest, "responses request"), passed


def chat_fields(request: ResponsesRequest) -> dict[str, Any]:
    """Returns the fields of the chat that means the same.

    Raises:
        InvalidRequest: an item of the input, a tool or a format is unsupported.
    """
    messages = [{"role": "system", "content": request.instructions}] if request.instructions else []
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    for item in items:
        _add(messages, item)
    fields = {
        "messages": messages,
        "model": request.model,
        "max_tokens": request.max_output_tokens,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "user": request.user,
        "request_id": request.request_id,
        "priority": request.priority,
        "response_format": _format(request.text.format),
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
    }
    if request.tools:
        fields["tools"] = [_tool(tool) for tool in request.tools]
        fields["parallel_tool_calls"] = request.parallel_tool_calls
    if request.tool_choice is not None:
        choice = request.tool_choice
        fields["tool_choice"] = choice if isinstance(choice, str) else _tool(choice)
    return fields


def _add(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Adds an item of the input to the messages of a chat."""
    match item:
        case {"role": str(role), "content": content} if item.get("type", "message") == "message":
            messages.append({"role": role, "content": _content(content)})
        case {"type": "function_call", "call_id": number, "name": name, "arguments": arguments}:
            call = {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        case {"type": "function_call_output", "call_id": number, "output": output}:
            messages.append({"role": "tool", "tool_call_id": number, "content": _content(output)})
        case {"type": "reasoning"}:
            pass
        case _:
            kind = item.get("type", "message")
            raise invalid_field("input", f"has a malformed or unsupported item of type {kind}: send messages of text")


def _content(content: object) -> object:
    """Returns the content of a chat's message; other types are passed on, since the chat refuses them."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in {"input_text", "output_text", "text"}:
            kind = part.get("type") if isinstance(part, dict) else part
            raise invalid_field("input", f"has content of type {kind}: text is the only kind")
        parts.append({"type": "text", "text": part.get("text")})
    return parts


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool, or the choice of a tool, in the shape of a chat."""
    if tool.get("type") != "function":
        raise invalid_field("tools", f"of type {tool.get('type')} are not supported: functions are")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _format(text_format: dict[str, Any] | None) -> dict[str, Any] | None:
    if text_format is None or text_format.get("type") != "json_schema":
        return text_format
    schema = {name: value for name, value in text_format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}
