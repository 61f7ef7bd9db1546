"""Reasoning and tool calls of an answer, in OpenAI's shapes."""

from collections.abc import Iterable
from typing import Literal

from pagewire.services.gateway.answers.answer_reader import AnswerReader
from pagewire.services.gateway.answers.openai_shapes import (
    ChatDelta,
    ChatMessage,
    FunctionCall,
    ToolCall,
    ToolCallDelta,
)
from pagewire.shared.chat.parts import Kind, Part
from pagewire.shared.messages.client import Choice, FinalChoice

FinishReason = Literal["stop", "length", "cancelled", "tool_calls"]


def message_of(choice: Choice, reader: AnswerReader) -> ChatMessage:
    """Returns the message of a whole choice."""
    parsed = reader.message(choice)
    message = ChatMessage(parsed.content)
    if parsed.reasoning is not None:
        message.reasoning = message.reasoning_content = parsed.reasoning
    if parsed.calls:
        message.tool_calls = [
            ToolCall(reader.call_id(choice.index, number), FunctionCall(call.arguments, call.name))
            for number, call in enumerate(parsed.calls)
        ]
    elif message.content is None:
        message.content = ""
    return message


def finish_reason_of(end: Choice | FinalChoice, reader: AnswerReader) -> FinishReason:
    """Returns why a choice that was read ends. A call that the request names is no reason, as with OpenAI."""
    return "tool_calls" if reader.calls(end) and not reader.is_named else end.finish_reason


def deltas_of(parts: Iterable[Part], choice: int, reader: AnswerReader) -> list[ChatDelta]:
    """Returns parts of a choice's message as the deltas of a stream."""
    deltas = []
    for part in parts:
        match part.kind:
            case Kind.CONTENT:
                deltas.append(ChatDelta(content=part.text))
            case Kind.REASONING:
                deltas.append(ChatDelta(reasoning=part.text, reasoning_content=part.text))
            case Kind.NAME:
                begin = FunctionCall("", part.text)
                call = ToolCallDelta(part.call, begin, reader.call_id(choice, part.call), "function")
                deltas.append(ChatDelta(tool_calls=[call]))
            case Kind.ARGUMENTS:
                deltas.append(ChatDelta(tool_calls=[ToolCallDelta(part.call, FunctionCall(part.text))]))
    return deltas
