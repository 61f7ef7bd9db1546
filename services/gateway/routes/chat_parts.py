"""What the chat path answers, in parts, for the routes that are other forms of a chat."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from pagewire.client.async_client import AsyncClient
from pagewire.services.gateway.answers.openai_shapes import ChatCompletion
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.services.gateway.routes.chat_completions import ChatCompletions
from pagewire.services.gateway.routes.endpoint import Call, EventStream
from pagewire.shared.errors import InvalidRequest

CHAT = ChatCompletions()
"""The chat path."""


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str = ""


class _ToolCall(msgspec.Struct):
    function: _Function
    index: int = 0
    id: str | None = None


class _Message(msgspec.Struct):
    """A message, or the next part of one."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] = []


class _Choice(msgspec.Struct):
    message: _Message = msgspec.field(default_factory=_Message)
    delta: _Message = msgspec.field(default_factory=_Message)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


@dataclass(slots=True)
class AnswerPart:
    """The next part of an answer.

    Attributes:
        kind: text, reasoning or a call of a tool; `end` has the reasons why the answer ends.
        text: the text, or a part of the arguments of a call.
        call: number of the call.
        call_id, name: of a call, in its first part.
    """

    kind: Literal["text", "reasoning", "call", "end"]
    text: str = ""
    call: int = 0
    call_id: str = ""
    name: str = ""
    finish_reason: str = ""
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Block:
    """A whole part of an answer: all parts of one kind in a row, or one call."""

    first: AnswerPart
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)

    def takes(self, part: AnswerPart) -> bool:
        """Returns whether a part belongs to this block."""
        return part.kind == self.first.kind and part.call == self.first.call


def read_chat(body: dict[str, Any], unknown: UnknownFields) -> Call:
    """Returns the request of a chat's body. Fields that are None are left out.

    Raises:
        InvalidRequest: see `chat_request.decode`; or a value is too deep, or an integer of more than 64 bits.
    """
    try:
        encoded = msgspec.json.encode({name: value for name, value in body.items() if value is not None})
    except (OverflowError, RecursionError) as error:
        raise InvalidRequest(f"the request cannot be read: {error}") from error
    return CHAT.read(encoded, unknown)


def parts_of(answer: ChatCompletion) -> Iterator[AnswerPart]:
    """Yields the parts of a whole answer."""
    found = msgspec.json.decode(msgspec.json.encode(answer), type=_Answer)
    for choice in found.choices:
        yield from _parts(choice.message)
        yield _end(choice)


def parts_in(events: bytes) -> Iterator[AnswerPart]:
    """Yields the parts in the events of a stream."""
    for event in events.split(b"\n\n"):
        if event:
            for choice in msgspec.json.decode(event.removeprefix(b"data: "), type=_Answer).choices:
                yield from _parts(choice.delta)
                if choice.finish_reason is not None:
                    yield _end(choice)


async def chat_events(client: AsyncClient, call: Call, stream: Any) -> EventStream:
    """Returns the events of the chat path."""
    return await CHAT.events(client, call, stream, counted=False)


def _parts(message: _Message) -> Iterator[AnswerPart]:
    if message.reasoning:
        yield AnswerPart("reasoning", message.reasoning)
    if message.content:
        yield AnswerPart("text", message.content)
    for number, call in enumerate(message.tool_calls):
        index = call.index or number
        yield AnswerPart("call", call.function.arguments, index, call.id or "", call.function.name or "")


def _end(choice: _Choice) -> AnswerPart:
    return AnswerPart("end", finish_reason=choice.finish_reason or "stop", stop_reason=choice.stop_reason)
