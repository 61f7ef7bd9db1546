"""Whatever stands at any place of a request is taken or refused by name: no decoder fails at it."""

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from pagewire.services.gateway.requests import anthropic_request, chat_request, ollama_request, responses_request
from pagewire.services.gateway.requests.ollama_request import OllamaChatRequest
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.shared.errors import RequestError

Place = tuple[str | int, ...]
ODD: list[Any] = [None, True, -1, 1.5, "", "x", [], [None], ["x"], {}, {"type": []}, {"type": "text"}]
"""Values of all types, which replace every element in turn."""
TEXT = [{"type": "text", "text": "x"}]
SCHEMA = {"type": "object"}
RESPONSES = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}], "content": TEXT},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "x"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "n"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "x"},
        {"type": "local_shell_call", "call_id": "e", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "e", "output": "x"},
        {"type": "tool_search_output", "call_id": "h", "tools": [{"type": "function", "name": "i"}]},
        {"type": "additional_tools", "tools": [{"type": "function", "name": "j"}]},
    ],
    "tools": [
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]},
        {"type": "custom", "name": "g", "format": {"type": "grammar", "definition": "x"}},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    "reasoning": {"effort": "low"},
}
MESSAGES = {
    "system": TEXT,
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "document", "source": {"type": "content", "content": TEXT}, "title": "x"},
                {"type": "search_result", "content": TEXT, "title": "x"},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "x", "signature": "x"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [*TEXT, {"type": "tool_reference", "tool_name": "f"}],
                }
            ],
        },
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA}, {"type": "bash_20250124", "name": "bash"}],
    "tool_choice": {"type": "tool", "name": "f"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
}
CHAT = {
    "messages": [
        {"role": "user", "content": TEXT, "name": "x"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": TEXT},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
}
OLLAMA = {
    "messages": [
        {"role": "user", "content": "x", "images": []},
        {"role": "assistant", "thinking": "x", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "x", "tool_name": "f"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "format": SCHEMA,
    "options": {"num_predict": 5, "stop": ["x"]},
}


ALLOWED = {
    **CHAT,
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
    },
}
WITHOUT_TOOLS = {"input": "x", "tool_choice": {"type": "function", "name": "f"}, "tools": [{"type": "web_search"}]}


def read_responses(body: bytes, unknown: UnknownFields) -> None:
    request, passed = responses_request.decode(body, unknown)
    fields, _ = responses_request.chat_fields(request, unknown)
    chat_request.of_fields(passed | fields)


def read_messages(body: bytes, unknown: UnknownFields) -> None:
    chat_request.of_fields(anthropic_request.chat_fields(anthropic_request.decode(body, unknown), unknown))


def read_ollama(body: bytes, unknown: UnknownFields) -> None:
    request = ollama_request.decode(body, OllamaChatRequest, unknown)
    chat_request.of_fields(ollama_request.chat_fields(request, unknown))


def places(value: object, place: Place = ()) -> Iterator[Place]:
    """The place of every element below a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*place, key)
        yield from places(inner, (*place, key))


def replaced(body: dict[str, Any], place: Place, odd: object) -> dict[str, Any]:
    """The body with another value at a place."""
    body = copy.deepcopy(body)
    holder: Any = body
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = odd
    return body


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (read_responses, RESPONSES),
        (read_messages, MESSAGES),
        (chat_request.decode, CHAT),
        (read_ollama, OLLAMA),
        (chat_request.decode, ALLOWED),
        (read_responses, WITHOUT_TOOLS),
    ],
    ids=["responses", "messages", "chat", "ollama", "allowed tools", "without tools"],
)
def test_every_element_may_be_of_another_type(
    read: Callable[[bytes, UnknownFields], object], body: dict[str, Any]
) -> None:
    read(msgspec.json.encode(body), UnknownFields(strict=False))
    for place in places(body):
        for odd in ODD:
            with suppress(RequestError):
                read(msgspec.json.encode(replaced(body, place, odd)), UnknownFields(strict=False))
