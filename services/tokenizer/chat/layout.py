"""Lays out a conversation with a chat template, as `transformers.apply_chat_template` does. Runs in the worker only."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from jinja2 import TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagewire.services.tokenizer.chat.content_format import content_format

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send the reasoning of an assistant; templates read the first two."""
END_MARK = "END_OF_THE_MESSAGE_TO_CONTINUE"
"""Put behind the message that is to be continued, to find its end in the text. Like the mark of `transformers` it comes
with a blank, which is missing in the text where the template strips messages."""

Message = dict[str, Any]


class Conversation(msgspec.Struct):
    """What is laid out. Its messages are plain data, without fields that are None."""

    messages: list[Message]
    add_generation_prompt: bool = True
    """Ends the text where the assistant begins to speak."""
    continue_final_message: bool = False
    """Ends the text where the last message ends, so that the model goes on with it."""
    variables: dict[str, Any] = {}
    """More that the template may look at, such as `enable_thinking`."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call, as JSON schemas."""


class Layout:
    """One compiled template."""

    def __init__(self, environment: ImmutableSandboxedEnvironment, source: str, special: Mapping[str, str]) -> None:
        """`special` has the special tokens by their names, such as `bos_token`.

        Raises:
            TemplateError: the source is not a template.
        """
        self._template = environment.from_string(source)
        syntax = environment.parse(source)
        self._format = content_format(syntax)
        self._knows_developer = any(constant.value == "developer" for constant in syntax.find_all(nodes.Const))
        self._reads_content = "content" in source
        self._special = dict(special)

    def text(self, conversation: Conversation) -> str:
        """The text that the model continues, special tokens spelled out.

        Raises:
            TemplateError: the template refuses the conversation, or it cannot be continued.
            Exception: whatever a template raises for messages that it was not written for.
        """
        messages = [self._prepared(message) for message in conversation.messages]
        final = _mark_end(messages[-1]) if conversation.continue_final_message else None
        if final is not None and not self._reads_content:
            raise TemplateError("continue_final_message is set, but the template reads no content")
        context: dict[str, Any] = {"documents": None, **self._special, **conversation.variables}
        context |= {
            "messages": messages,
            "tools": conversation.tools,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        text = self._template.render(context)
        return text if final is None else _up_to_mark(text, final)

    def _prepared(self, message: Message) -> Message:
        """A message in the form that the template takes."""
        message = dict(message)
        if message["role"] == "developer" and not self._knows_developer:
            message["role"] = "system"
        content = message.get("content")
        if isinstance(content, list) and not self._format.takes_parts:
            message["content"] = "\n".join(part["text"] for part in content)
        elif isinstance(content, str) and not self._format.takes_text:
            message["content"] = [{"type": "text", "text": content}]
        reasoning = next((message[name] for name in REASONING if name in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        if "tool_calls" in message:
            message["tool_calls"] = [_with_parsed_arguments(call) for call in message["tool_calls"]]
        return message


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments, JSON in a string as OpenAI has them, are the object that templates expect."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except msgspec.DecodeError:
        return call  # what a model has written may be no JSON
    return {**call, "function": {**function, "arguments": arguments}}


def _mark_end(message: Message) -> str:
    """Puts the mark behind the text of a message; returns that text."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = f"{content}{END_MARK} "
        return content
    parts: Sequence[Message] = content or []
    for index in reversed(range(len(parts))):
        if "text" in parts[index]:
            text = str(parts[index]["text"])
            marked = {**parts[index], "text": f"{text}{END_MARK} "}
            message["content"] = [*parts[:index], marked, *parts[index + 1 :]]
            return text
    raise TemplateError("continue_final_message is set, but the final message has no text to continue")


def _up_to_mark(text: str, final: str) -> str:
    """The text before the mark; where the template strips messages, without the blanks before it."""
    place = text.rfind(END_MARK)
    if place < 0 or final.strip() not in text:
        raise TemplateError("continue_final_message is set, but the template does not show the final message as it is")
    kept = text[:place]
    return kept if text.startswith(" ", place + len(END_MARK)) else kept.rstrip()
