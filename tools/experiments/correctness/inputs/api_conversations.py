"""Forty valid conversations, as bodies of requests to the four APIs that take messages.

Each text in them is a word of its own, so that a prompt shows which are left out.
"""

from collections.abc import Mapping
from typing import Any

CHAT, RESPONSES, MESSAGES, NATS = "/v1/chat/completions", "/v1/responses", "/v1/messages", "pagewire.v1.generate"
"""The APIs."""

_PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string", "description": "Where"}},
    "required": ["place"],
}
_FUNCTION = {"name": "lookup_tool", "description": "Looks a place up", "parameters": _PARAMETERS}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_RESPONSES_TOOLS = [{"type": "function", **_FUNCTION}]
_MESSAGES_TOOLS = [{"name": "lookup_tool", "description": "Looks a place up", "input_schema": _PARAMETERS}]


def _turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _text(*texts: str, kind: str = "text") -> list[dict[str, str]]:
    return [{"type": kind, "text": text} for text in texts]


def _call(number: str, place: str) -> dict[str, Any]:
    function = {"name": "lookup_tool", "arguments": f'{{"place": "{place}"}}'}
    return {"id": number, "type": "function", "function": function}


def _result(number: str, text: str) -> dict[str, Any]:
    return _turn("tool", text, tool_call_id=number)


def _use(number: str, place: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": number, "name": "lookup_tool", "input": {"place": place}}


def _reply(number: str, text: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": number, "content": text}


def _item_call(number: str, place: str) -> dict[str, Any]:
    call = _call(number, place)["function"]
    return {"type": "function_call", "call_id": number, **call}


def _output(number: str, text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": number, "output": text}


_ONE, _TWO = "call_0123456789abcdef01234567", "call_76543210fedcba9876543210"
_USER, _BRIEF, _LATE = _turn("user", "zebra"), _turn("system", "walnut"), _turn("system", "teapot")
_HI, _MORE = _turn("assistant", "orchid"), _turn("user", "lantern")
_CALLED = _turn("assistant", None, tool_calls=[_call(_ONE, "Lisbon")])
_BOTH = _turn("assistant", None, tool_calls=[_call(_ONE, "Lisbon"), _call(_TWO, "Madrid")])
_FIRST, _SECOND = _result(_ONE, "sunshine"), _result(_TWO, "thunder")

_CHATS: Mapping[str, list[dict[str, Any]]] = {
    "a question": [_USER],
    "a system message": [_BRIEF, _USER],
    "several turns": [_BRIEF, _USER, _HI, _MORE],
    "two system messages": [_BRIEF, _LATE, _USER],
    "a late system message": [_BRIEF, _USER, _HI, _LATE, _MORE],
    "a system message at the end": [_USER, _LATE],
    "system and developer": [_BRIEF, _turn("developer", "teapot"), _USER],
    "two turns of the user": [_USER, _MORE],
    "an assistant first": [_HI, _USER],
    "a system message alone": [_BRIEF],
    "parts": [_turn("system", _text("walnut")), _turn("user", _text("zebra", "lantern"))],
    "reasoning": [_USER, {**_HI, "reasoning_content": "pondering"}, _MORE],
    "reasoning without a text": [_USER, _turn("assistant", None, reasoning="pondering"), _MORE],
}
_CHATS_WITH_TOOLS: Mapping[str, list[dict[str, Any]]] = {
    "tools": [_BRIEF, _USER],
    "a call": [_USER, _CALLED, _FIRST],
    "a call with an empty text": [_USER, {**_CALLED, "content": ""}, _FIRST, _HI, _MORE],
    "a call without a content": [_USER, {key: _CALLED[key] for key in ("role", "tool_calls")}, _FIRST],
    "a call behind a text": [_USER, {**_CALLED, "content": "orchid"}, _FIRST],
    "a call behind reasoning": [_USER, {**_CALLED, "reasoning_content": "pondering"}, _FIRST],
    "a call behind reasoning and a text": [
        _USER,
        {**_CALLED, "content": "orchid", "reasoning_content": "pondering"},
        _FIRST,
    ],
    "parallel calls": [_USER, _BOTH, _FIRST, _SECOND],
    "a user behind a result": [_USER, _CALLED, _FIRST, _MORE],
    "a call that nobody answered": [_USER, _CALLED, _MORE],
}
_INPUTS: Mapping[str, dict[str, Any]] = {
    "a text": {"input": "zebra"},
    "instructions and a developer": {"instructions": "walnut", "input": [_turn("developer", "teapot"), _USER]},
    "a developer late": {"instructions": "walnut", "input": [_USER, _HI, _turn("developer", "teapot"), _MORE]},
    "context and a question, both of the user": {
        "instructions": "walnut",
        "input": [_turn("user", _text("zebra", kind="input_text")), _turn("user", _text("lantern", kind="input_text"))],
    },
    "a call and its output": {
        "input": [_USER, _item_call(_ONE, "Lisbon"), _output(_ONE, "sunshine")],
        "tools": _RESPONSES_TOOLS,
    },
    "a text, two calls, two outputs": {
        "instructions": "walnut",
        "input": [
            _USER,
            _turn("assistant", _text("orchid", kind="output_text")),
            _item_call(_ONE, "Lisbon"),
            _item_call(_TWO, "Madrid"),
            _output(_ONE, "sunshine"),
            _output(_TWO, "thunder"),
        ],
        "tools": _RESPONSES_TOOLS,
    },
    "calls one by one": {
        "input": [
            _USER,
            _item_call(_ONE, "Lisbon"),
            _output(_ONE, "sunshine"),
            _item_call(_TWO, "Madrid"),
            _output(_TWO, "thunder"),
            _HI,
            _MORE,
        ],
        "tools": _RESPONSES_TOOLS,
    },
}
_TURNS: Mapping[str, dict[str, Any]] = {
    "two blocks of system": {"system": _text("walnut", "teapot"), "messages": [_USER]},
    "a result and a text": {
        "messages": [
            _USER,
            _turn("assistant", [*_text("orchid"), _use("toolu_01", "Lisbon")]),
            _turn("user", [_reply("toolu_01", _text("sunshine")), *_text("lantern")]),
        ],
        "tools": _MESSAGES_TOOLS,
    },
    "two results and a text": {
        "system": "walnut",
        "messages": [
            _USER,
            _turn("assistant", [_use("toolu_01", "Lisbon"), _use("toolu_02", "Madrid")]),
            _turn("user", [_reply("toolu_01", "sunshine"), _reply("toolu_02", "thunder"), *_text("lantern")]),
        ],
        "tools": _MESSAGES_TOOLS,
    },
    "thoughts before a call": {
        "messages": [
            _USER,
            _turn("assistant", [{"type": "thinking", "thinking": "pondering", "signature": ""}, _use("t", "Lisbon")]),
            _turn("user", [_reply("t", "sunshine")]),
        ],
        "tools": _MESSAGES_TOOLS,
    },
    "a result of nothing": {
        "messages": [_USER, _turn("assistant", [_use("t", "Lisbon")]), _turn("user", [_reply("t", "")])],
        "tools": _MESSAGES_TOOLS,
    },
    "two turns of the user": {"system": "walnut", "messages": [_USER, _MORE]},
}
_STARTS: Mapping[str, dict[str, Any]] = {
    "a continued answer": {
        "messages": [_BRIEF, _USER, _HI],
        "continue_final_message": True,
    },
    "a continued answer behind a result": {
        "messages": [_USER, _CALLED, _FIRST, _HI],
        "continue_final_message": True,
        "tools": _TOOLS,
    },
    "variables": {"messages": [_USER], "chat_template_kwargs": {"enable_thinking": False}},
    "calls in the history without tools": {"messages": [_USER, _CALLED, _FIRST, _HI, _MORE]},
}

CONVERSATIONS: list[tuple[str, str, dict[str, Any]]] = [
    *((CHAT, title, {"messages": messages}) for title, messages in _CHATS.items()),
    *((CHAT, title, {"messages": messages, "tools": _TOOLS}) for title, messages in _CHATS_WITH_TOOLS.items()),
    *((RESPONSES, title, body) for title, body in _INPUTS.items()),
    *((MESSAGES, title, {"max_tokens": 8, **body}) for title, body in _TURNS.items()),
    *((NATS, title, body) for title, body in _STARTS.items()),
]
"""The API, the title and the body of each."""
