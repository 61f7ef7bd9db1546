"""Finds out which messages a chat template takes, by rendering tiny conversations with it. Pure."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, Literal

import msgspec

from pagewire.shared.chat.formats.kimi_k2 import CALL

Missing = Literal["missing"]
MISSING: Missing = "missing"
"""Stands for a content that a message does not have."""
LONG_ID, SHORT_ID = "call_qzlong0000000000000000", "qzshort00"
"""Ids of a call: one as OpenAI writes it, and one of nine letters and digits."""

Message = dict[str, Any]
"""A message as plain data."""
RenderMessages = Callable[[Sequence[Message], Sequence[Message] | None], str]
"""Renders messages and tools, with the beginning of an answer behind messages that end with another role than
assistant's. Raises whatever the template raises."""
Shows = Callable[..., bool]
"""Returns whether a template renders messages and shows all of the further arguments, which are texts."""


class MessageRules(msgspec.Struct, frozen=True, omit_defaults=True):
    """The messages that a template takes: it renders them and shows their texts. The defaults take everything."""

    shows_tools: bool = True
    """Tools."""
    shows_calls: bool = True
    """Calls of tools with their results."""
    system: bool = True
    """A system message."""
    several_systems: bool = True
    """Several system messages at the beginning."""
    late_system: bool = True
    """A system message behind other turns."""
    system_beside_results: bool = True
    """A system message in a conversation that ends with results of calls."""
    repeated_turns: bool = True
    """Two turns of the user in a row."""
    assistant_first: bool = True
    """A conversation that an assistant begins."""
    no_user: bool = True
    """A conversation without a user."""
    single_part: tuple[str, ...] = ()
    """Roles of whose messages with several parts only the first part is shown."""
    no_content: bool = True
    """An assistant's message without content, beside its reasoning."""
    no_content_beside_calls: bool = True
    """Calls without content."""
    null_beside_calls: bool = False
    """Whether calls without content must have a content that is null."""
    empty_beside_calls: bool = True
    """Calls beside an empty content."""
    text_beside_calls: bool = True
    """Calls beside a text: the calls are shown; whether the text is, the template decides."""
    reasoning_beside_text_and_calls: bool = True
    """Calls beside a text and reasoning."""
    parallel_calls: bool = True
    """Several calls in one message, and their results in a row."""
    arguments_as_text: bool = False
    """Whether the arguments of calls must be texts; else they are objects."""
    short_ids: bool = False
    """Whether the ids of calls must have nine letters and digits."""
    numbered_ids: bool = False
    """Whether the ids of calls must be `functions.NAME:NUMBER`, since the model has written them so."""
    reasoning: bool = False
    """Whether reasoning is shown under the key `reasoning` alone."""


def probe(render: RenderMessages) -> MessageRules:
    """Returns the rules of a template. A template that takes no question at all gets the defaults.

    >>> def render(messages, tools):
    ...     if any(message["role"] == "system" for message in messages[1:]):
    ...         raise ValueError("System message must be at the beginning.")
    ...     return str((messages, tools))
    >>> rules = probe(render)
    >>> rules.system, rules.late_system, rules.shows_tools
    (True, False, True)
    """

    def shows(messages: Sequence[Message], *texts: str, tools: Sequence[Message] | None) -> bool:
        try:
            rendered = render(messages, tools)
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001  # templates may raise any exception
            return False
        return all(text in rendered for text in texts)

    question = [_turn("user", "qzuser")]
    shows_tools = shows(question, "qzuser", "qztool", tools=[_TOOL])
    if shows(question, "qzuser", tools=None):
        rules = _rules_of_roles(partial(shows, tools=None))
    elif shows_tools:  # a template for tools alone
        rules = _rules_of_roles(partial(shows, tools=[_TOOL]))
    else:
        return MessageRules()
    rules_of_calls = _rules_of_calls(partial(shows, tools=[_TOOL] if shows_tools else None))
    return MessageRules(shows_tools=shows_tools, **rules, **rules_of_calls)


def _rules_of_roles(shows: Shows) -> dict[str, Any]:
    """Returns the rules of texts of any role."""
    user, assistant, system = _turn("user", "qzuser"), _turn("assistant", "qzassistant"), _turn("system", "qzsystem")
    later, second = _turn("user", "qzlater"), _turn("system", "qzsecond")
    thinking = {"role": "assistant", **_THOUGHTS}
    system_and_second = ("qzsystem", "qzuser", "qzsecond")
    parts = [{"type": "text", "text": text} for text in ("qzpart", "qzsecond")]
    one, two = {"content": parts[:1]}, {"content": parts}
    takes_system = shows([system, user], "qzsystem", "qzuser")
    return {
        "system": takes_system,
        "several_systems": takes_system and shows([system, second, user], *system_and_second),
        "late_system": takes_system and shows([system, user, assistant, second, later], *system_and_second, "qzlater"),
        "repeated_turns": shows([user, later], "qzuser", "qzlater"),
        "assistant_first": shows([assistant, user], "qzassistant", "qzuser"),
        "no_user": shows([system], "qzsystem") if takes_system else shows([assistant], "qzassistant"),
        "single_part": tuple(
            message["role"]
            for message in (system, user, assistant)
            if shows([user, message | one, later], "qzpart") and not shows([user, message | two, later], "qzsecond")
        ),
        "no_content": shows([user, thinking, later], "qzlater"),
    }


def _rules_of_calls(shows: Shows) -> dict[str, Any]:
    """Returns the rules of calls, of their results and of reasoning."""
    question, answer = _turn("user", "qzuser"), _turn("assistant", "qzassistant")
    by_other_keys, by_reasoning = (
        shows([question, answer | thoughts], "qzthought")
        or shows([question, _calling() | thoughts, _RESULT], "qzthought")
        for thoughts in (_THOUGHTS, {"reasoning": "qzthought"})
    )
    reasoning = by_reasoning and not by_other_keys

    def takes(messages: Sequence[Message], *texts: str) -> bool:
        return shows([question, *messages], "qztool", "qzplace", "qzresult", *texts)

    for number, as_text, content in product((LONG_ID, SHORT_ID), (False, True), (MISSING, None, "", "qzassistant")):
        result = {**_RESULT, "tool_call_id": number}
        if takes([_calling(content, number, as_text=as_text), result]):
            break
    else:
        return {"shows_calls": False, "reasoning": reasoning}
    calling = partial(_calling, number=number, as_text=as_text)
    call, text = calling(content), calling("qzassistant")
    (own,), other_id = call["tool_calls"], f"{number[:-1]}1"
    (other,) = _calling(content, other_id, as_text=as_text, name="qzother")["tool_calls"]
    other_result = _turn("tool", "qzelse", tool_call_id=other_id, name="qzother")
    return {
        "system_beside_results": shows([_turn("system", "qzsystem"), question, call, result], "qzsystem", "qzresult"),
        "no_content_beside_calls": takes([calling(), result]),
        "null_beside_calls": content is None,
        "empty_beside_calls": takes([calling(""), result]),
        "text_beside_calls": takes([text, result]),
        "reasoning_beside_text_and_calls": takes([text | _THOUGHTS, result]),
        "parallel_calls": takes([{**call, "tool_calls": [own, other]}, result, other_result], "qzother", "qzelse"),
        "arguments_as_text": as_text,
        "short_ids": number == SHORT_ID,
        "numbered_ids": takes([call, result], f"{CALL}{number}"),
        "reasoning": reasoning,
    }


def _turn(role: str, content: str | None, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def _calling(
    content: str | Missing | None = MISSING, number: str = LONG_ID, *, as_text: bool = False, name: str = "qztool"
) -> Message:
    """Returns a message with a call."""
    arguments = '{"place": "qzplace"}' if as_text else {"place": "qzplace"}
    call = {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call]}
    return message if content is MISSING else {**message, "content": content}


_RESULT = _turn("tool", "qzresult", tool_call_id=LONG_ID, name="qztool")
_THOUGHTS = {"thinking": "qzthought", "reasoning_content": "qzthought"}
_PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string", "description": "Where"}},
    "required": ["place"],
}
_TOOL = {
    "type": "function",
    "function": {"name": "qztool", "description": "The weather", "parameters": _PARAMETERS},
}
