"""The messages and tools of Anthropic's API as those of a chat."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from pagewire.services.gateway.requests.api_elements import MESSAGES_BLOCKS, MESSAGES_TOOLS, Treatment
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.shared.errors import invalid_field

Message = dict[str, Any]
BILLING = "x-anthropic-billing-header"
"""Beginning of a text that Claude Code puts ahead of its system prompt. It changes with each version of the client, and
would spoil the prefix cache."""
_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_EDITING = {
    "path": _STRING,
    "file_text": _STRING,
    "old_str": _STRING,
    "new_str": _STRING,
    "insert_line": _INTEGER,
    "insert_text": _STRING,
    "view_range": {"type": "array", "items": _INTEGER},
}
"""Properties of the tools that edit files."""
_CLIENT_TOOLS: Mapping[str, tuple[str, dict[str, Any], list[str]]] = {
    "bash": (
        "Runs a command in a shell that keeps its state.",
        {"command": _STRING, "restart": {"type": "boolean"}},
        [],
    ),
    "text_editor": (
        "Views, creates and edits files.",
        {"command": {"enum": ["view", "create", "str_replace", "insert"]}, **_EDITING},
        ["command", "path"],
    ),
    "memory": (
        "Keeps notes in files under /memories.",
        {
            "command": {"enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
            **_EDITING,
            "old_path": _STRING,
            "new_path": _STRING,
        },
        ["command"],
    ),
}
"""Description, properties and required properties of the tools that Anthropic defines and clients run."""


def system_text(system: str | list[Any]) -> str:
    """Returns the text of a system prompt.

    >>> system_text([{"type": "text", "text": "x-anthropic-billing-header: v2"}, {"type": "text", "text": "Be brief."}])
    'Be brief.'

    Raises:
        InvalidRequest: a block is no text.
    """
    if isinstance(system, str):
        return system
    texts = []
    for index, block in enumerate(system):
        match block:
            case {"type": "text", "text": str(text)}:
                if not text.startswith(BILLING):
                    texts.append(text)
            case _:
                raise invalid_field("system", f"[{index}] is no text: send blocks of type text")
    return "\n".join(texts)


def turns_of(role: str, content: str | list[Any] | None, unknown: UnknownFields, index: int) -> list[Message]:
    """Returns one of Anthropic's messages as messages of a chat, where each result of a tool is one of its own.

    Raises:
        InvalidRequest: a block is malformed, or an answer without it would be wrong; the error has its indices.
    """
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    turns: list[Message] = []
    texts: list[dict[str, str]] = []
    turn: Message = {"role": role}
    for number, block in enumerate(content or ()):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append({"type": "text", "text": text})
            case {"type": "thinking", "thinking": str(thinking)}:
                turn["reasoning_content"] = turn.get("reasoning_content", "") + thinking
            case {"type": "tool_use", "id": str(call_id), "name": str(name)} if isinstance(
                arguments := block.get("input") or {}, dict
            ):
                function = {"name": name, "arguments": msgspec.json.encode(arguments).decode()}
                turn.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
            case {"type": "tool_result", "tool_use_id": str(call_id)} if isinstance(
                result := block.get("content") or "", str | list
            ):
                turns.append({"role": "tool", "tool_call_id": call_id, "content": _result(result)})
            case {"type": "document" | "search_result"} if (shown := _document(block)) is not None:
                texts.append({"type": "text", "text": shown})
            case {"type": str(kind)} if MESSAGES_BLOCKS.get(kind, Treatment.LEFT_OUT) is Treatment.LEFT_OUT:
                unknown.leave_out("block", kind)
            case {"type": "image" | "document" as kind}:
                raise invalid_field("messages", f"[{index}].content[{number}] is of type {kind}: text is the only kind")
            case _:
                raise invalid_field("messages", f"[{index}].content[{number}] is malformed")
    if texts or len(turn) > 1 or not turns:
        turns.append({**turn, "content": texts if texts or "tool_calls" not in turn else None})
    return turns


def tools_of(tools: Iterable[Any], unknown: UnknownFields) -> list[dict[str, Any]]:
    """Returns tools in the shape of a chat; hosted ones are left out.

    Raises:
        InvalidRequest: a tool is malformed.
    """
    functions = []
    for index, tool in enumerate(tools):
        match tool:
            case {"name": str(name), "input_schema": dict(schema)} if tool.get("type") in (None, "custom"):
                function = {"name": name, "parameters": schema, "description": tool.get("description") or ""}
                if tool.get("strict") is True:
                    function["strict"] = True
                functions.append({"type": "function", "function": function})
            case {"type": str(versioned), "name": str(name)} if (kind := tool_kind(versioned)) in _CLIENT_TOOLS:
                description, properties, required = _CLIENT_TOOLS[kind]
                schema = {"type": "object", "properties": properties, "required": required}
                function = {"name": name, "parameters": schema, "description": description}
                functions.append({"type": "function", "function": function})
            case {"type": str(versioned)} if MESSAGES_TOOLS.get(tool_kind(versioned)) is not Treatment.BUILT:
                unknown.leave_out("tool", versioned)
            case _:
                raise invalid_field("tools", f"[{index}] is malformed: give it a name and an input_schema")
    return functions


def tool_kind(versioned: str) -> str:
    """Returns the type of a tool without the date of its version."""
    name, _, version = versioned.rpartition("_")
    return name if version.isdigit() else versioned


def _result(content: str | list[Any]) -> str:
    """Returns the text of a tool's result. Blocks without a text become one that says so: a refusal would end the
    session, since clients send its history with every request."""
    if isinstance(content, str):
        return content
    texts = []
    for block in content:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "document" | "search_result"} if (shown := _document(block)) is not None:
                texts.append(shown)
            case {"type": "tool_reference", "tool_name": str(name)}:
                texts.append(f"[tool {name}]")
            case _:
                kind = block.get("type") if isinstance(block, dict) else block
                texts.append(f"[{kind} not shown: the model reads text only]")
    return "\n".join(texts)


def _document(block: Mapping[str, Any]) -> str | None:
    """Returns a document or a search result as text, with its title; None: it is no text."""
    match block:
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            pass
        case {"type": "document", "source": {"type": "content", "content": str(text)}}:
            pass
        case {"type": "document", "source": {"type": "content", "content": list(blocks)}}:
            text = _result(blocks)
        case {"type": "search_result", "content": list(blocks)}:
            text = _result(blocks)
        case _:
            return None
    title = block.get("title")
    return f"{title}\n{text}" if isinstance(title, str) and title else text
