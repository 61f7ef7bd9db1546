"""Decodes the bodies of Anthropic's `/v1/messages` into fields of a chat."""

from typing import Any, Literal

import msgspec

from pagewire.services.gateway.requests.anthropic_blocks import system_text, tools_of, turns_of
from pagewire.services.gateway.requests.api_elements import MESSAGES_FIELDS, Treatment, names_of
from pagewire.services.gateway.requests.sampling_fields import converted, read_fields
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.shared.errors import invalid_field


class InputMessage(msgspec.Struct):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Any] | None
    """Text, or blocks (`anthropic_blocks.py`)."""


class ToolChoice(msgspec.Struct):
    """Whether the model may call tools (auto), must call some (any) or one (tool), or may not (none)."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class Metadata(msgspec.Struct):
    """The sender of the request."""

    user_id: str | None = None
    """The `user` of other routes."""


class Thinking(msgspec.Struct):
    """Whether the model reasons before it answers, if its template lets the request decide."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputConfig(msgspec.Struct):
    """The form and the length of the answer."""

    format: dict[str, Any] | None = None
    """`{"type": "json_schema", "schema": ...}`: the answer is JSON that the schema takes."""
    effort: str | None = None
    """How much the model reasons, if its template reads `reasoning_effort`."""


class MessagesRequest(msgspec.Struct, kw_only=True):
    """Anthropic's fields."""

    messages: list[InputMessage]
    model: str = ""
    max_tokens: int | None = None
    """Maximum number of generated tokens, without which an answer is refused; a count of tokens does not need it."""
    system: str | list[Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    tools: list[Any] | None = None
    """Tools that the model may call, in Anthropic's shape: `name`, `description` and `input_schema`, or one of
    Anthropic's types in the table at the end."""
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    """An older name of `output_config.format`."""
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


FIELDS = frozenset(MessagesRequest.__struct_fields__)
FREE_FORM = frozenset({"chat_template_kwargs", "messages", "output_config", "output_format", "system", "tools"})
"""Fields whose values may have any form."""


def decode(body: bytes, unknown: UnknownFields) -> MessagesRequest:
    """Returns the request in a body.

    Raises:
        InvalidRequest: the body is malformed, or a field is of the wrong type or unsupported.
    """
    fields = read_fields(body, FIELDS | MESSAGES_FIELDS.keys(), "messages request", unknown, free_form=FREE_FORM)
    for name in fields.keys() & names_of(MESSAGES_FIELDS, Treatment.LEFT_OUT):
        if fields[name]:
            unknown.leave_out("field", name)
    return converted(fields, MessagesRequest, "messages request")


def chat_fields(request: MessagesRequest, unknown: UnknownFields) -> dict[str, Any]:
    """Returns the fields of the chat that means the same.

    Raises:
        InvalidRequest: a message, a tool or the format of the output is malformed or unsupported.
    """
    messages = []
    if request.system and (text := system_text(request.system)):
        messages.append({"role": "system", "content": text})
    for index, message in enumerate(request.messages):
        messages += turns_of(message.role, message.content, unknown, index)
    output = request.output_config or OutputConfig()
    fields: dict[str, Any] = {
        "messages": messages,
        "model": request.model,
        "max_tokens": request.max_tokens,
        "stream": request.stream,
        "stop": request.stop_sequences,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "user": request.metadata.user_id,
        "cache_salt": request.cache_salt,
        "chat_template_kwargs": _template_variables(request),
        "reasoning_effort": output.effort,
        "response_format": _format(output.format or request.output_format),
    }
    if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    functions, choice = tools_of(request.tools or (), unknown), request.tool_choice
    if functions:
        fields["tools"] = functions
    if choice is not None and (functions or choice.type not in {"auto", "none"}):
        function = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = {"any": "required", "tool": function}.get(choice.type, choice.type)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _template_variables(request: MessagesRequest) -> dict[str, Any] | None:
    """Returns the variables of the chat template."""
    if request.thinking is None or request.thinking.type == "adaptive":
        return request.chat_template_kwargs
    return {"enable_thinking": request.thinking.type == "enabled"} | (request.chat_template_kwargs or {})


def _format(output_format: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the chat's `response_format`.

    Raises:
        InvalidRequest: the format is unknown or malformed.
    """
    match output_format:
        case None:
            return None
        case {"type": "json_schema", "schema": dict(schema)}:
            return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    raise invalid_field("output_config", 'format is malformed: send {"type": "json_schema", "schema": {...}}')
