"""Brings a conversation into the form that a chat template takes: messages are merged, split or mapped. Pure.

Messages that the template takes as they are, are not changed.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pagewire.services.tokenizer.chat.template_probe import Message, MessageRules
from pagewire.services.tokenizer.chat.text_tools import joined, text_of

INSTRUCTIONS = frozenset({"system", "developer"})
"""Roles of messages that instruct the model."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys in which clients send the reasoning of an assistant; most templates read one of the first two, which
`transformers` fills, some the third alone."""

_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")


def formed(messages: Sequence[Message], rules: MessageRules) -> list[Message]:
    """Returns the messages in the form that a template with these rules takes.

    >>> rules = MessageRules(late_system=False)
    >>> formed([{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}], rules)
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hi'}]
    """
    turns = list(messages)
    if rules.single_part:
        turns = [_with_one_part(turn, rules) for turn in turns]
    turns = _with_one_system(turns, rules)
    turns = [turn for message in turns for turn in _assistant_turns(message, rules)]
    if not rules.parallel_calls:
        turns = list(_one_by_one(turns, rules))
    if rules.short_ids:
        turns = [_with_short_ids(turn) for turn in turns]
    if rules.numbered_ids:
        turns = list(_with_numbered_ids(turns))
    if not rules.repeated_turns:
        turns = _alternating(turns)
    if not (rules.assistant_first and rules.no_user):
        turns = _with_user(turns, rules)
    return turns


def _with_one_system(messages: list[Message], rules: MessageRules) -> list[Message]:
    """Returns the messages with all instructions in one system message at the beginning, unless they are taken. A
    template without system messages gets them in the first turn of the user."""
    instructions = [message for message in messages if message["role"] in INSTRUCTIONS]
    leading = all(message["role"] in INSTRUCTIONS for message in messages[: len(instructions)])
    several = len(instructions) < 2 or rules.several_systems
    takes_system = rules.system and (rules.system_beside_results or messages[-1]["role"] != "tool")
    if not instructions or (takes_system and several and (leading or rules.late_system)):
        return messages
    system = instructions[0]
    for message in instructions[1:]:
        system = {**system, "content": joined(system.get("content"), message.get("content"))}
    others = [message for message in messages if message["role"] not in INSTRUCTIONS]
    if takes_system:
        return [system, *others]
    if others and others[0]["role"] == "user":
        return [{**others[0], "content": joined(system.get("content"), others[0].get("content"))}, *others[1:]]
    return [{**system, "role": "user"}, *others]


def _with_one_part(message: Message, rules: MessageRules) -> Message:
    """Returns a message with a text instead of parts, if the template shows only the first of them."""
    content = message.get("content")
    if message["role"] not in rules.single_part or not isinstance(content, list) or len(content) < 2:
        return message
    return {**message, "content": text_of(content)}


def _assistant_turns(message: Message, rules: MessageRules) -> Iterator[Message]:
    """Yields a message as it is, or an assistant's with a content and reasoning that the template takes."""
    if message["role"] != "assistant":
        yield message
        return
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        if rules.reasoning:
            message["reasoning"] = reasoning
    content = message.get("content")
    if not message.get("tool_calls"):
        yield message if rules.no_content or content is not None else {**message, "content": ""}
    elif not text_of(content):
        yield message if content is not None and rules.empty_beside_calls else _without_content(message, rules)
    elif not rules.text_beside_calls:
        yield {key: value for key, value in message.items() if key != "tool_calls"}
        yield _without_content({key: value for key, value in message.items() if key not in REASONING}, rules)
    elif reasoning is not None and not rules.reasoning_beside_text_and_calls:
        thoughts = dict.fromkeys(message.keys() & set(REASONING), joined(reasoning, content))
        yield _without_content({**message, **thoughts}, rules)
    else:
        yield message


def _without_content(message: Message, rules: MessageRules) -> Message:
    """Returns calls without a text."""
    if rules.null_beside_calls:
        return {**message, "content": None}
    if not rules.no_content_beside_calls:
        return {**message, "content": ""}
    return {key: value for key, value in message.items() if key != "content"}


def _one_by_one(messages: Sequence[Message], rules: MessageRules) -> Iterator[Message]:
    """Yields the messages with one call in each, and its result behind it."""
    index = 0
    while index < len(messages):
        message, index = messages[index], index + 1
        if len(message.get("tool_calls") or ()) < 2:
            yield message
            continue
        end = index
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        results, index = list(messages[index:end]), end
        for call in message["tool_calls"]:
            yield {**message, "tool_calls": [call]}
            message = {key: value for key, value in message.items() if key not in REASONING}
            message = _without_content(message, rules)
            own = [result for result in results if result.get("tool_call_id") == call.get("id")]
            yield from own
            results = [result for result in results if result not in own]
        yield from results


def _with_short_ids(message: Message) -> Message:
    """Returns a message whose ids of calls have nine letters and digits, the same id for the same id."""
    if message.get("tool_calls"):
        calls = [{**call, "id": _short(call["id"])} if "id" in call else call for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    if message.get("tool_call_id") is not None:
        return {**message, "tool_call_id": _short(message["tool_call_id"])}
    return message


def _with_numbered_ids(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields the messages with the ids `functions.NAME:NUMBER`, where calls are numbered over the conversation."""
    ids: dict[str, str] = {}
    number = 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            match call:
                case {"function": {"name": str(name)}}:
                    ids[str(call.get("id"))] = numbered = f"functions.{name}:{number}"
                    number += 1
                    calls.append({**call, "id": numbered})
                case _:  # what is no call of a function is left to the template
                    calls.append(call)
        answered = message.get("tool_call_id")
        if calls:
            yield {**message, "tool_calls": calls}
        elif answered is not None and str(answered) in ids:
            yield {**message, "tool_call_id": ids[str(answered)]}
        else:
            yield message


def _short(number: Any) -> str:
    text = str(number)
    return text if _SHORT_ID.fullmatch(text) else hashlib.sha256(text.encode(errors="replace")).hexdigest()[:9]


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with turns of user and assistant by turns, calls and their results aside: neighbours of one
    role are joined, and an empty answer stands between a result and a text of the user."""
    turns: list[Message] = []
    last = ""
    for message in messages:
        role = message["role"]
        if role not in {"user", "assistant"}:
            turns.append(message)
            continue
        before = turns[-1] if turns else {}
        if role == before.get("role") and not before.get("tool_calls"):
            turns[-1] = {**before, **message, "content": joined(before.get("content"), message.get("content"))}
            if message.get("tool_calls"):
                last = "user"  # the call takes the place of the answer
            continue
        if message.get("tool_calls"):
            turns.append(message)
            continue
        if role == last:
            turns.append({"role": "assistant" if role == "user" else "user", "content": ""})
        turns.append(message)
        last = role
    return turns


def _with_user(messages: list[Message], rules: MessageRules) -> list[Message]:
    """Returns the messages with an empty turn of the user where the template asks for one."""
    start = next(
        (index for index, message in enumerate(messages) if message["role"] not in INSTRUCTIONS), len(messages)
    )
    has_user = any(message["role"] == "user" for message in messages)
    begins = start < len(messages) and messages[start]["role"] == "user"
    if (has_user or rules.no_user) and (begins or rules.assistant_first or start == len(messages)):
        return messages
    return [*messages[:start], {"role": "user", "content": ""}, *messages[start:]]
