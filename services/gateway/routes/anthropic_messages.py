"""Anthropic's `/v1/messages`, as a form of a chat."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

from pagewire.client.async_client import AsyncClient
from pagewire.client.stream import Stream
from pagewire.services.gateway.http import errors
from pagewire.services.gateway.requests.anthropic_request import chat_body, decode
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.services.gateway.routes.chat_parts import (
    CHAT,
    AnswerPart,
    Block,
    chat_events,
    parts_in,
    parts_of,
    read_chat,
)
from pagewire.services.gateway.routes.endpoint import Call, EventStream
from pagewire.shared.errors import PagewireError, invalid_field
from pagewire.shared.messages import client as wire
from pagewire.shared.messages.client import Delta, Final, Result

_STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}
_encode = msgspec.json.Encoder().encode


class Usage(msgspec.Struct):
    """Number of tokens, in Anthropic's way: those that were read from the cache are no input tokens."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class TextContent(msgspec.Struct, tag="text"):
    """A text of the answer."""

    text: str


class ThinkingContent(msgspec.Struct, tag="thinking"):
    """Reasoning before the answer."""

    thinking: str
    signature: str = ""


class ToolUseContent(msgspec.Struct, tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


Content = TextContent | ThinkingContent | ToolUseContent


class Message(msgspec.Struct):
    """The response to a messages request."""

    id: str
    model: str
    content: list[Content]
    usage: Usage
    stop_reason: str | None = None
    """end_turn, max_tokens, stop_sequence or tool_use."""
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class Messages:
    """The `Api` of Anthropic's messages."""

    def read(self, body: bytes, unknown: UnknownFields) -> Call:
        """See `Api.read`."""
        request = decode(body, unknown)
        if request.max_tokens is None:
            raise invalid_field("max_tokens", "is required: say how many tokens the answer may have")
        return read_chat(chat_body(request, request.max_tokens), unknown)

    async def answer(self, client: AsyncClient, call: Call, stream: Stream, result: Result) -> msgspec.Struct:
        """See `Api.answer`."""
        *parts, end = parts_of(await CHAT.answer(client, call, stream, result))
        message = Message(f"msg_{stream.request_id}", stream.model, _contents(parts), _usage(result.usage))
        message.stop_reason, message.stop_sequence = _stop(end)
        return message

    async def events(self, client: AsyncClient, call: Call, stream: Stream, *, counted: bool) -> EventStream:
        """See `Api.events`."""
        del counted
        return AnthropicEvents(
            await chat_events(client, call, stream), Message(f"msg_{stream.request_id}", stream.model, [], Usage(0, 0))
        )


class AnthropicEvents:
    """The `EventStream` of Anthropic's messages: a block of content begins, grows and ends, then the next one."""

    done: ClassVar[bytes] = b""

    def __init__(self, chat: EventStream, message: Message) -> None:
        """`chat`: the events of the chat path."""
        self._chat = chat
        self._message = message
        self._block: Block | None = None
        self._index = -1

    def beginning(self, choices: int, prompt_tokens: int | None = None) -> bytes:
        """Returns the event that the message begins."""
        del choices
        self._message.usage.input_tokens = prompt_tokens or 0
        return _event("message_start", message=self._message)

    def texts(self, batch: Sequence[Delta], prompt_tokens: int | None = None) -> bytes:
        """Returns the events of deltas."""
        return self._parts(self._chat.texts(batch, prompt_tokens))

    def ends(self, final: Final, *, usage: bool) -> bytes:
        """Returns the rest of the message, why it ends, and the usage."""
        del usage
        return self._parts(self._chat.ends(final, usage=False), final)

    def failed(self, error: PagewireError) -> bytes:
        """Returns the event of an error."""
        return b"event: error\ndata: " + errors.body_of(error, errors.MESSAGES)[1] + b"\n\n"

    def _parts(self, events: bytes, final: Final | None = None) -> bytes:
        found = []
        for part in parts_in(events):
            if part.kind == "end":
                found.append(self._end(part, final))
                continue
            if self._block is None or not self._block.takes(part):
                found.append(self._begin(part))
            if delta := _delta(part):
                found.append(_event("content_block_delta", index=self._index, delta=delta))
        return b"".join(found)

    def _begin(self, part: AnswerPart) -> bytes:
        stopped = self._stop()
        self._block = Block(part)
        self._index += 1
        return stopped + _event("content_block_start", index=self._index, content_block=_content(Block(part)))

    def _stop(self) -> bytes:
        return b"" if self._block is None else _event("content_block_stop", index=self._index)

    def _end(self, part: AnswerPart, final: Final | None) -> bytes:
        assert final is not None
        begun = self._begin(AnswerPart("text")) if self._block is None else b""
        reason, sequence = _stop(part)
        told = _event(
            "message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=_usage(final.usage)
        )
        return begun + self._stop() + told + _event("message_stop")


def _event(name: str, /, **fields: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode({"type": name, **fields}) + b"\n\n"


def _contents(parts: Sequence[AnswerPart]) -> list[Content]:
    blocks: list[Block] = []
    for part in parts or [AnswerPart("text")]:
        if not blocks or not blocks[-1].takes(part):
            blocks.append(Block(part))
        blocks[-1].texts.append(part.text)
    return [_content(block) for block in blocks]


def _content(block: Block) -> Content:
    first, text = block.first, block.text
    if first.kind == "reasoning":
        return ThinkingContent(text)
    if first.kind == "text":
        return TextContent(text)
    return ToolUseContent(first.call_id, first.name, _input(text))


def _input(arguments: str) -> dict[str, Any]:
    """Returns the arguments of a call as an object; a model may have written what is none."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any]) if arguments else {}
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": arguments}


def _delta(part: AnswerPart) -> dict[str, str] | None:
    if not part.text:
        return None
    match part.kind:
        case "reasoning":
            return {"type": "thinking_delta", "thinking": part.text}
        case "text":
            return {"type": "text_delta", "text": part.text}
        case _:
            return {"type": "input_json_delta", "partial_json": part.text}


def _stop(end: AnswerPart) -> tuple[str, str | None]:
    """Returns why a message ends, and the stop sequence that ends it."""
    if end.finish_reason == "stop" and isinstance(end.stop_reason, str):
        return "stop_sequence", end.stop_reason
    return _STOPS.get(end.finish_reason, "end_turn"), None


def _usage(usage: wire.Usage) -> Usage:
    cached = usage.cached_tokens
    return Usage(usage.prompt_tokens - cached, usage.completion_tokens, cached)
