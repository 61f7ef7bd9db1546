"""Decodes the bodies of OpenAI's `/v1/responses` into fields of a chat."""

from typing import Any

import msgspec

from pagewire.services.gateway.requests.api_elements import RESPONSES_FIELDS, Treatment
from pagewire.services.gateway.requests.responses_input import messages_of
from pagewire.services.gateway.requests.responses_tools import ResponsesTools
from pagewire.services.gateway.requests.sampling_fields import TokenLimit, converted, read_fields
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.shared.errors import invalid_field
from pagewire.shared.messages.client import SamplingParams


class TextOptions(msgspec.Struct):
    """The form of the answer's text."""

    format: dict[str, Any] | None = None
    """OpenAI's `response_format` of a chat, without the level `json_schema`."""
    verbosity: str | None = None
    """How long the answer should be; a hint without an effect."""


class Reasoning(msgspec.Struct):
    """The reasoning before the answer."""

    effort: str | None = None
    """How much, for a chat template that reads `reasoning_effort`."""
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
_REFUSED = frozenset({"beam_width", "best_of", "length_penalty", "logprobs", "max_tokens", "n", "prompt_logprobs"})
"""Sampling fields whose results have no place in an answer of this route, or that have another name here."""
PASSED = frozenset(SamplingParams.__struct_fields__) - FIELDS - _REFUSED | {
    "cache_salt",
    "chat_template_kwargs",
    "include_reasoning",
    "timeout_ms",
}
"""Fields of vLLM's that have the same meaning as in a chat."""
FREE_FORM = frozenset({"input", "tools", "text", "tool_choice"})
"""Fields whose values may have any form."""


def decode(body: bytes, unknown: UnknownFields) -> tuple[ResponsesRequest, dict[str, Any]]:
    """Returns the request in a body, and its fields of `PASSED`, which are not checked.

    Raises:
        InvalidRequest: the body is malformed, or a field is of the wrong type or unsupported.
    """
    names = FIELDS | PASSED | RESPONSES_FIELDS.keys()
    fields = read_fields(body, names, "responses request", unknown, free_form=FREE_FORM)
    for name in fields.keys() & RESPONSES_FIELDS.keys():
        match RESPONSES_FIELDS[name]:
            case Treatment.REFUSED if fields[name]:
                reason = "nothing is stored or computed in the background: send the whole conversation as input"
                raise invalid_field(name, f"is not supported, since {reason}")
            case Treatment.LEFT_OUT:
                unknown.leave_out("field", name)
    passed = {name: fields.pop(name) for name in PASSED & fields.keys()}
    return converted(fields, ResponsesRequest, "responses request"), passed


def chat_fields(request: ResponsesRequest, unknown: UnknownFields) -> tuple[dict[str, Any], ResponsesTools]:
    """Returns the fields of the chat that means the same, and the tools as the client knows them.

    Raises:
        InvalidRequest: an item of the input, a tool or a format is unsupported.
    """
    tools = ResponsesTools()
    tools.add(request.tools or (), unknown)
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        messages += messages_of(request.input, tools, unknown)
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
    choice = None if request.tool_choice is None else tools.choice(request.tool_choice)
    if tools.functions:
        fields["tools"] = tools.functions
        fields["parallel_tool_calls"] = request.parallel_tool_calls
    if tools.functions or choice not in ("auto", "none"):  # it may be an object
        fields["tool_choice"] = choice
    return fields, tools


def _format(text_format: dict[str, Any] | None) -> dict[str, Any] | None:
    if text_format is None or text_format.get("type") != "json_schema":
        return text_format
    schema = {name: value for name, value in text_format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}
