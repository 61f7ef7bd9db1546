"""The items of the input of OpenAI's responses as the messages of a chat."""

from collections.abc import Mapping
from typing import Any

import msgspec

from pagewire.services.gateway.requests.api_elements import RESPONSES_ITEMS, RESPONSES_PARTS, Treatment
from pagewire.services.gateway.requests.responses_tools import INPUT, ResponsesTools, function_name
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.shared.errors import invalid_field

Message = dict[str, Any]
_CALLS = frozenset({"apply_patch_call", "local_shell_call", "shell_call", "tool_search_call"})
"""Calls of OpenAI's own tools that a client has run: the rest of such an item is what the model asked for."""
_OUTPUTS = frozenset({"apply_patch_call_output", "local_shell_call_output", "shell_call_output", "tool_search_output"})
"""The outputs of these calls."""
_NO_ARGUMENTS = frozenset({"type", "id", "call_id", "status"})
"""Fields of a call or an output that its text does not show."""


def messages_of(items: list[Any], tools: ResponsesTools, unknown: UnknownFields) -> list[Message]:
    """Returns the messages of a chat. Tools that the items bring are added to `tools`.

    Raises:
        InvalidRequest: an item is malformed, or an answer without it would be wrong; the error has its index.
    """
    messages: list[Message] = []
    for index, item in enumerate(items):
        match item:
            case {"type": "additional_tools", "tools": list(more)}:
                tools.add(more, unknown)
            case dict():
                _add(messages, item, tools, unknown, index)
            case _:
                raise invalid_field("input", f"[{index}] is no item: send objects")
    return messages


def _add(
    messages: list[Message], item: Mapping[str, Any], tools: ResponsesTools, unknown: UnknownFields, index: int
) -> None:
    """Adds an item to the messages."""
    match item:
        case {"role": str(role), "content": content} if item.get("type") in ("message", None):
            message = {"role": role, "content": _content(content, index)}
            if role == "assistant":
                _extend_assistant(messages, message)
            else:
                messages.append(message)
        case {"type": "function_call", "call_id": str(number), "name": str(name)}:
            _call(messages, number, function_name(item.get("namespace"), name), item.get("arguments") or "{}")
        case {"type": "custom_tool_call", "call_id": str(number), "name": str(name), "input": str(text)}:
            arguments = msgspec.json.encode({INPUT: text}).decode()
            _call(messages, number, function_name(item.get("namespace"), name), arguments)
        case {"type": str(kind)} if kind in _CALLS:
            arguments = msgspec.json.encode({name: item[name] for name in item if name not in _NO_ARGUMENTS}).decode()
            _call(messages, _number(item), kind.removesuffix("_call"), arguments)
        case {"type": "function_call_output" | "custom_tool_call_output", "call_id": str(number)}:
            content = _content(item.get("output"), index, placeholders=True)
            messages.append({"role": "tool", "tool_call_id": number, "content": "" if content is None else content})
        case {"type": str(kind)} if kind in _OUTPUTS:
            if isinstance(brought := item.get("tools"), list):
                tools.add(brought, unknown)
            output = {name: item[name] for name in item if name not in _NO_ARGUMENTS}
            text = output["output"] if isinstance(output.get("output"), str) else msgspec.json.encode(output).decode()
            messages.append({"role": "tool", "tool_call_id": _number(item), "content": text})
        case {"type": "reasoning"}:
            if text := _reasoning(item):
                _extend_assistant(messages, {"role": "assistant", "content": None, "reasoning_content": text})
        case {"type": str(kind)}:
            match RESPONSES_ITEMS.get(kind, Treatment.LEFT_OUT):
                case Treatment.LEFT_OUT:
                    unknown.leave_out("item", kind)
                case Treatment.REFUSED:
                    reason = "nothing is stored: send the item itself (SDKs do with store: false)"
                    raise invalid_field("input", f"[{index}] is of type {kind}, but {reason}")
                case _:
                    raise invalid_field("input", f"[{index}] is a malformed {kind}")
        case _:
            raise invalid_field("input", f"[{index}] has neither a role with content nor a type")


def _extend_assistant(messages: list[Message], message: Message) -> None:
    """Adds a part of an assistant's turn: its reasoning, text and calls are items, and one message of a chat."""
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and last["content"] is None and "tool_calls" not in last:
        last["content"] = message["content"]
        if more := message.get("reasoning_content"):
            last["reasoning_content"] = last.get("reasoning_content", "") + more
    else:
        messages.append(message)


def _call(messages: list[Message], number: str, name: str, arguments: str) -> None:
    """Adds a call to the assistant's turn, which it may begin."""
    if not (messages and messages[-1]["role"] == "assistant"):
        messages.append({"role": "assistant", "content": None})
    call = {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
    messages[-1].setdefault("tool_calls", []).append(call)


def _number(item: Mapping[str, Any]) -> str:
    """Returns the id of a call of one of OpenAI's own tools, which some of them have under `id` alone."""
    return str(item.get("call_id") or item.get("id") or "")


def _reasoning(item: Mapping[str, Any]) -> str:
    """Returns the text of an earlier reasoning; the encrypted one of a provider cannot be read here."""
    parts = next((parts for name in ("content", "summary") if isinstance(parts := item.get(name), list) and parts), [])
    return "\n".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def _content(content: object, index: int, *, placeholders: bool = False) -> object:
    """Returns the content of a chat's message; values of other types are passed on, since the chat refuses them.

    With `placeholders`, a part that is no text becomes one that says so, instead of an error.
    """
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        text = part.get("refusal") if kind == "refusal" else part.get("text") if isinstance(part, dict) else None
        if RESPONSES_PARTS.get(str(kind)) is not Treatment.BUILT or not isinstance(text, str):
            if not placeholders:
                raise invalid_field("input", f"[{index}] has content of type {kind}: text is the only kind")
            text = f"[{kind} not shown: the model reads text only]"
        parts.append({"type": "text", "text": text})
    return parts
