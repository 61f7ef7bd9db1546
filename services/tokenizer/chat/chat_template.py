"""Renders a conversation with a chat template, like `transformers.apply_chat_template`. Runs in the worker only."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from jinja2 import TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagewire.services.tokenizer.chat.content_format import content_format

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields in which clients send the reasoning of an assistant; templates read the first two."""
END_MARK = "END_OF_THE_MESSAGE_TO_CONTINUE"
"""Text that is appended to the message to continue, to find its end in the rendered text. A space follows, as after the
mark of `transformers`; a template that strips messages removes it."""

Message = dict[str, Any]
"""A message as plain data, without fields that are None."""


class Conversation(msgspec.Struct):
    """The input of a template."""

    messages: list[Message]
    add_generation_prompt: bool = True
    """Whether the text ends with the beginning of an assistant message."""
    continue_final_message: bool = False
    """Whether the text ends at the end of the last message, so that the model continues this message."""
    variables: dict[str, Any] = {}
    """Further variables of the template, such as `enable_thinking`."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call, as JSON schemas."""


class ChatTemplate:
    """One compiled template."""

    def __init__(self, environment: ImmutableSandboxedEnvironment, source: str, special: Mapping[str, str]) -> None:
        """`special`: special tokens by name, such as `bos_token`.

        Raises:
            TemplateError: the source is not a valid template.
        """
        self._template = environment.from_string(source)
        syntax = environment.parse(source)
        self._format = content_format(syntax)
        self._has_developer = any(constant.value == "developer" for constant in syntax.find_all(nodes.Const))
        self._reads_content = "content" in source
        self._special = dict(special)

    def render(self, conversation: Conversation) -> str:
        """Returns the text for the model to continue, special tokens included.

        Raises:
            TemplateError: the template rejects the conversation, or the final message cannot be continued.
            Exception: any other error, from a template that was not written for such messages.
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
        """Returns a message in the form that the template expects."""
        message = dict(message)
        if message["role"] == "developer" and not self._has_developer:
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
    """Returns a tool call with arguments as an object, which templates expect, instead of OpenAI's JSON string."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except msgspec.DecodeError:
        return call  # a model may have written invalid JSON
    return {**call, "function": {**function, "arguments": arguments}}


def _mark_end(message: Message) -> str:
    """Appends the mark to the text of a message; returns the text without the mark."""
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
    """Returns the text before the mark, without trailing spaces if the template strips messages."""
    place = text.rfind(END_MARK)
    if place < 0 or final.strip() not in text:
        raise TemplateError("continue_final_message is set, but the template does not show the final message as it is")
    before = text[:place]
    return before if text.startswith(" ", place + len(END_MARK)) else before.rstrip()
