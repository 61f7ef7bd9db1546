"""Decodes the bodies of Anthropic's `/v1/messages` into fields of a chat."""

from typing import Any, Literal

import msgspec

from pagewire.services.gateway.requests.sampling_fields import converted, read_fields
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.shared.errors import invalid_field


class CacheControl(msgspec.Struct):
    """Anthropic's mark of a prefix to keep; it has no effect, since every prefix is kept."""

    type: str = "ephemeral"


class TextBlock(msgspec.Struct, tag="text"):
    """A text."""

    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """Reasoning of an earlier answer."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, tag="redacted_thinking"):
    """Reasoning that nobody can read; it is left out."""

    data: str = ""


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    """A call of a tool in an earlier answer."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, tag="tool_result"):
    """The answer of a tool."""

    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: bool = False


InputBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class Tool(msgspec.Struct):
    """A function that the model may call."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None


class ToolChoice(msgspec.Struct):
    """Whether the model may call tools (auto), must call some (any) or one (tool), or may not (none)."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class Metadata(msgspec.Struct):
    """The sender of the request."""

    user_id: str | None = None
    """The `user` of other routes."""


class Thinking(msgspec.Struct):
    """Whether the model reasons before it answers, if its template lets the request decide."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class MessagesRequest(msgspec.Struct, kw_only=True):
    """Anthropic's fields."""

    messages: list[InputMessage]
    model: str = ""
    max_tokens: int | None = None
    system: str | list[TextBlock] | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


FIELDS = frozenset(MessagesRequest.__struct_fields__)
IGNORED = frozenset({"betas", "cache_control", "container", "context_management", "inference_geo", "service_tier"})
"""Fields that Anthropic documents and that have no meaning here."""
NOT_BUILT = frozenset({"mcp_servers", "output_config", "output_format"})
"""Fields that change the answer and are refused."""
FREE_FORM = frozenset({"chat_template_kwargs", "messages", "tools"})
"""Fields whose values may have any form."""


def decode(body: bytes, unknown: UnknownFields) -> MessagesRequest:
    """Returns the request in a body.

    Raises:
        InvalidRequest: the body is malformed, or a field is of the wrong type or unsupported.
    """
    names = FIELDS | IGNORED
    fields = read_fields(body, names, "messages request", unknown, not_built=NOT_BUILT, free_form=FREE_FORM)
    for name in fields.keys() & {"system", "messages"}:
        _check_types(name, fields[name])
    return converted(fields, MessagesRequest, "messages request")


def chat_fields(request: MessagesRequest, max_tokens: int | None) -> dict[str, Any]:
    """Returns the fields of the chat that means the same."""
    messages = [{"role": "system", "content": text_of(request.system)}] if request.system else []
    for message in request.messages:
        messages += _turns(message)
    choice = request.tool_choice
    fields: dict[str, Any] = {
        "messages": messages,
        "model": request.model,
        "max_tokens": max_tokens,
        "stream": request.stream,
        "stop": request.stop_sequences,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "user": request.metadata.user_id,
        "cache_salt": request.cache_salt,
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    if request.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.name, "parameters": tool.input_schema, "description": tool.description or ""},
            }
            for tool in request.tools
        ]
    if choice is not None:
        function = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = {"any": "required", "tool": function}.get(choice.type, choice.type)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if request.thinking is not None and request.thinking.type != "adaptive":
        thinks = {"enable_thinking": request.thinking.type == "enabled"}
        fields["chat_template_kwargs"] = thinks | (request.chat_template_kwargs or {})
    return fields


def text_of(content: str | list[TextBlock]) -> str:
    """Returns the text of one or several blocks."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _check_types(name: str, blocks: object) -> None:
    """Checks that blocks of content have types: without one, any block would be read as a text where texts must be.

    Raises:
        InvalidRequest: a block has no type.
    """
    for block in blocks if isinstance(blocks, list) else ():
        if isinstance(block, dict):
            if not {"type", "role"} & block.keys():
                raise invalid_field(name, "has a block without a type: text is one")
            _check_types(name, block.get("content"))


def _turns(message: InputMessage) -> list[dict[str, Any]]:
    """Returns one of Anthropic's messages as messages of a chat, where each result of a tool is one of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    turns: list[dict[str, Any]] = []
    texts: list[dict[str, str]] = []
    turn: dict[str, Any] = {"role": message.role}
    for block in message.content:
        match block:
            case TextBlock(text):
                texts.append({"type": "text", "text": text})
            case ThinkingBlock(thinking):
                turn["reasoning_content"] = turn.get("reasoning_content", "") + thinking
            case ToolUseBlock(number, name, arguments):
                function = {"name": name, "arguments": msgspec.json.encode(arguments).decode()}
                turn.setdefault("tool_calls", []).append({"id": number, "type": "function", "function": function})
            case ToolResultBlock(number, content):
                turns.append({"role": "tool", "tool_call_id": number, "content": text_of(content)})
    if texts or len(turn) > 1 or not turns:
        turns.append({**turn, "content": texts if texts or "tool_calls" not in turn else None})
    return turns
