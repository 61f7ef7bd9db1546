"""Tools as text, for a model whose chat template does not show them: in the system message, and in turns that every
template takes. Calls are written in the format `hermes`. Pure."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pagewire.services.tokenizer.chat.template_probe import Message
from pagewire.shared.chat.formats import hermes

_BEGIN = f'{hermes.OPEN}\n{{"name": '
_ARGUMENTS = ', "arguments": '
_END = f"}}\n{hermes.CLOSE}"
_INSTRUCTIONS = f"""# Tools

You can call functions. These are their JSON schemas, one in each line:
<tools>
%s
</tools>

To call a function, write one JSON object with its name and its arguments between {hermes.OPEN} and {hermes.CLOSE}:
{_BEGIN}"NAME"{_ARGUMENTS}{{"ARGUMENT": VALUE}}{_END}
The next message has its result between <tool_response> and </tool_response>."""


def with_text_tools(messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
    """Returns the messages with tools in the system message, and with calls and their results as texts.

    >>> call = {"function": {"name": "f", "arguments": "{}"}}
    >>> with_text_tools([{"role": "assistant", "content": None, "tool_calls": [call]}], [])
    [{'role': 'assistant', 'content': '<tool_call>\\n{"name": "f", "arguments": {}}\\n</tool_call>'}]
    """
    turns = list(_turns(messages))
    if not tools:
        return turns
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS % lines
    if turns and turns[0]["role"] in {"system", "developer"}:
        first = {**turns[0], "content": joined(turns[0].get("content"), instructions)}
        return [first, *turns[1:]]
    return [{"role": "system", "content": instructions}, *turns]


def text_of(content: Any) -> str:
    """Returns the text of a message's content: a text, parts of it, or null."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def joined(first: Any, second: Any, separator: str = "\n\n") -> str:
    """Returns the texts of two contents as one."""
    return separator.join(text for text in (text_of(first), text_of(second)) if text)


def _turns(messages: Sequence[Message]) -> Iterator[Message]:
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{text_of(message.get('content'))}\n</tool_response>")
            continue
        if results:
            yield {"role": "user", "content": "\n".join(results)}
            results = []
        if message.get("tool_calls"):
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            calls = "\n".join(map(_call, message["tool_calls"]))
            yield {**rest, "content": joined(message.get("content"), calls, "\n")}
        else:
            yield message
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _call(call: Message) -> str:
    function = call.get("function") or {}
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f"{_BEGIN}{json.dumps(function.get('name'), ensure_ascii=False)}{_ARGUMENTS}{arguments}{_END}"
