"""Reasoning and tool calls of an answer, in OpenAI's shapes."""

import hashlib
from collections.abc import Iterable
from typing import Literal

import msgspec

from pagewire.services.gateway.answers.openai_shapes import (
    ChatDelta,
    ChatMessage,
    FunctionCall,
    ToolCall,
    ToolCallDelta,
)
from pagewire.shared.chat.formats import NAMED
from pagewire.shared.chat.parser import read_message
from pagewire.shared.chat.parts import Kind, Part
from pagewire.shared.messages.client import ChatFormat, Choice, FinalChoice

FinishReason = Literal["stop", "length", "cancelled", "tool_calls"]


def call_id(request_id: str, choice: int, call: int, form: ChatFormat) -> str:
    """Returns the id of a call, the same for the same request. Mistral's templates take only ids of 9 letters."""
    digest = hashlib.sha256(f"{request_id} {choice} {call}".encode()).hexdigest()
    return f"call{digest[:5]}" if form.tool_calls == "mistral" else f"call_{digest[:24]}"


def message_of(choice: Choice, form: ChatFormat | None, request_id: str, *, reasoning: bool) -> ChatMessage:
    """Returns the message of a completion; `reasoning`: with its reasoning."""
    if form is None:
        return ChatMessage(choice.text)
    found = read_message(choice.text, form)
    message = ChatMessage(found.content)
    if reasoning and found.reasoning is not None:
        message.reasoning = message.reasoning_content = found.reasoning
    if found.calls:
        message.tool_calls = [
            ToolCall(call_id(request_id, choice.index, index, form), FunctionCall(call.arguments, call.name))
            for index, call in enumerate(found.calls)
        ]
    elif message.content is None:
        message.content = ""
    return message


def finish_reason(end: Choice | FinalChoice, form: ChatFormat | None, *, calls: bool) -> FinishReason:
    """Returns why a message ends. A call that was named by the request is no reason, as with OpenAI."""
    named = form is None or form.tool_calls == NAMED
    return "tool_calls" if calls and end.finish_reason == "stop" and not named else end.finish_reason


def deltas_of(
    parts: Iterable[Part], form: ChatFormat, request_id: str, choice: int, *, reasoning: bool
) -> list[ChatDelta]:
    """Returns parts of a message as the deltas of a stream; `reasoning`: with the reasoning."""
    found = []
    for part in parts:
        match part.kind:
            case Kind.CONTENT:
                found.append(ChatDelta(content=part.text))
            case Kind.REASONING if reasoning:
                found.append(ChatDelta(reasoning=part.text, reasoning_content=part.text))
            case Kind.NAME:
                begin = FunctionCall("", part.text)
                number = call_id(request_id, choice, part.call, form)
                found.append(ChatDelta(tool_calls=[ToolCallDelta(part.call, begin, number, "function")]))
            case Kind.ARGUMENTS:
                found.append(ChatDelta(tool_calls=[ToolCallDelta(part.call, FunctionCall(part.text))]))
    return found


def has_calls(message: ChatMessage) -> bool:
    """Returns whether a message has calls."""
    return message.tool_calls is not msgspec.UNSET
