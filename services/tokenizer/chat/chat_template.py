"""Renders a conversation with a chat template, like `transformers.apply_chat_template`. Runs in the worker only."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from jinja2 import TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagewire.services.tokenizer.chat.content_format import content_format
from pagewire.services.tokenizer.chat.message_form import formed
from pagewire.services.tokenizer.chat.template_probe import Message, MessageRules, probe
from pagewire.services.tokenizer.chat.text_tools import text_of, with_text_tools

END_MARK = "END_OF_THE_MESSAGE_TO_CONTINUE"
"""Text that is appended to the message to continue, to find its end in the rendered text. A space follows, as after the
mark of `transformers`; a template that strips messages removes it."""

SEARCH_SECONDS = 0.1
"""CPU seconds in which the message that a template refuses is looked for."""


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
    tools_as_text: bool = False
    """Whether the tools, calls and results are texts, because the template shows no tools."""


class ChatTemplate:
    """One compiled template.

    Attributes:
        rules: the messages that it takes; by default all.
    """

    def __init__(self, environment: ImmutableSandboxedEnvironment, source: str, special: Mapping[str, str]) -> None:
        """`special`: special tokens by name, such as `bos_token`.

        Raises:
            TemplateError: the source is not a valid template.
        """
        self.rules = MessageRules()
        self._template = environment.from_string(source)
        syntax = environment.parse(source)
        self._format = content_format(syntax)
        self._has_developer = any(constant.value == "developer" for constant in syntax.find_all(nodes.Const))
        self._reads_content = "content" in source
        self._special = dict(special)

    def probe(self) -> MessageRules:
        """Returns the messages that the template takes, as `rules` shall be."""

        def render(messages: Sequence[Message], tools: Sequence[Message] | None) -> str:
            conversation = Conversation(
                [], messages[-1]["role"] != "assistant", tools=None if tools is None else [*tools]
            )
            return self._rendered([self.in_form(message) for message in messages], conversation)

        return probe(render)

    def render(self, conversation: Conversation) -> str:
        """Returns the text for the model to continue, special tokens included.

        Raises:
            TemplateError: the template rejects the conversation, or the final message cannot be continued.
            Exception: any other error, from a template that was not written for such messages.
        """
        messages = [self._prepared(message) for message in self._formed(conversation)]
        final = _mark_end(messages[-1]) if conversation.continue_final_message else None
        if final is not None and not self._reads_content:
            raise TemplateError("continue_final_message is set, but the template reads no content")
        text = self._rendered(messages, conversation)
        return text if final is None else _up_to_mark(text, final)

    def refused_message(self, conversation: Conversation) -> int | None:
        """Returns the index of the message that the template refuses: it takes those before. None: it is not known.

        `conversation` is refused as a whole. Messages are tried for `SEARCH_SECONDS`.
        """
        deadline = time.process_time() + SEARCH_SECONDS
        taken, refused = 0, len(conversation.messages)
        while refused - taken > 1:
            if time.process_time() > deadline:
                return None
            middle = (taken + refused) // 2
            beginning = Conversation(
                conversation.messages[:middle],
                variables=conversation.variables,
                tools=conversation.tools,
                tools_as_text=conversation.tools_as_text,
            )
            try:
                self.render(beginning)
                taken = middle
            except MemoryError:
                raise
            except Exception:  # noqa: BLE001  # templates may raise any exception
                refused = middle
        return taken

    def _rendered(self, messages: Sequence[Message], conversation: Conversation) -> str:
        """Returns the text of prepared messages; the messages of `conversation` itself are not read."""
        context: dict[str, Any] = {"documents": None, **self._special, **conversation.variables}
        context |= {
            "messages": messages,
            "tools": None if conversation.tools_as_text else conversation.tools,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        return self._template.render(context)

    def _formed(self, conversation: Conversation) -> list[Message]:
        """Returns the messages in the form that the template takes."""
        messages, tools = conversation.messages, conversation.tools if conversation.tools_as_text else None
        if tools or not self.rules.shows_calls:
            messages = with_text_tools(messages, tools or ())
        mended, taking = formed(messages, self.rules), _with_systems(self.rules)
        if taking == self.rules or (as_sent := formed(messages, taking)) == mended:
            return mended
        return as_sent if self._shows(as_sent, conversation) else mended

    def _shows(self, messages: Sequence[Message], conversation: Conversation) -> bool:
        """Returns whether the template renders messages and shows all texts that are not beside calls."""
        try:
            text = self._rendered([self._prepared(message) for message in messages], conversation)
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001  # templates may raise any exception
            return False
        shown = (text_of(each.get("content")).strip() for each in messages if not each.get("tool_calls"))
        return all(each in text for each in shown)

    def _prepared(self, message: Message) -> Message:
        """Returns a message with the role, content and arguments in the form that the template expects."""
        return self.in_form(_with_arguments(message, as_text=self.rules.arguments_as_text))

    def in_form(self, message: Message) -> Message:
        """Returns a message with the role and the form of content that the template expects."""
        message = dict(message)
        if message["role"] == "developer" and not self._has_developer:
            message["role"] = "system"
        content = message.get("content")
        if isinstance(content, list) and not self._format.takes_parts:
            message["content"] = "\n".join(part["text"] for part in content)
        elif isinstance(content, str) and not self._format.takes_text:
            message["content"] = [{"type": "text", "text": content}]
        return message


def _with_systems(rules: MessageRules) -> MessageRules:
    """Returns rules that take system messages anywhere: a template may take one where the probe has tried others."""
    return msgspec.structs.replace(rules, system=True, several_systems=True, late_system=True)


def _with_arguments(message: Message, *, as_text: bool) -> Message:
    """Returns a message whose calls have arguments as texts or as objects."""
    if "tool_calls" not in message:
        return message
    adapted = _with_text_arguments if as_text else _with_parsed_arguments
    return {**message, "tool_calls": [adapted(call) for call in message["tool_calls"] or ()]}


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool call with arguments as JSON."""
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    return {
        **call,
        "function": {**function, "arguments": msgspec.json.encode(function.get("arguments") or {}).decode()},
    }


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
