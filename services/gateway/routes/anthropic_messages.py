"""Anthropic's `/v1/messages`, as a form of a chat."""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from typing_extensions import override

from pagewire.client.async_client import AsyncClient
from pagewire.client.stream import Stream
from pagewire.services.gateway.answers.answer_reader import AnswerBlock, AnswerReader
from pagewire.services.gateway.answers.block_events import BlockEvents
from pagewire.services.gateway.answers.sse import EventStream, sse
from pagewire.services.gateway.http import errors
from pagewire.services.gateway.requests import chat_request
from pagewire.services.gateway.requests.anthropic_request import chat_fields, decode
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.services.gateway.routes.chat_completions import call_of, reader_of
from pagewire.services.gateway.routes.endpoint import Api, ApiCall
from pagewire.shared.chat.parts import Kind
from pagewire.shared.errors import PagewireError, invalid_field
from pagewire.shared.messages import client as wire
from pagewire.shared.messages.client import Choice, Final, FinalChoice, Result

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
    """end_turn, max_tokens, model_context_window_exceeded, stop_sequence or tool_use."""
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class Messages(Api):
    """Anthropic's messages."""

    @override
    def read(self, body: bytes, unknown: UnknownFields) -> ApiCall:
        request = decode(body, unknown)
        if request.max_tokens is None:
            raise invalid_field("max_tokens", "is required: say how many tokens the answer may have")
        call = call_of(*chat_request.of_fields(chat_fields(request, unknown)))
        call.arguments["clamp_max_tokens"] = True
        return call

    @override
    async def answer(self, client: AsyncClient, call: ApiCall, stream: Stream, result: Result) -> Message:
        reader = reader_of(call, stream.request_id, result.chat_format)
        (choice,) = result.choices
        blocks = reader.blocks(choice)
        message = Message(f"msg_{stream.request_id}", stream.model, _contents(blocks), _usage(result.usage))
        uses = reader.calls(choice) and any(_is_use(block) for block in blocks)
        message.stop_reason, message.stop_sequence = _stop(choice, result.usage, call, uses=uses)
        return message

    @override
    async def events(self, client: AsyncClient, call: ApiCall, stream: Stream, *, counted: bool) -> EventStream:
        message = Message(f"msg_{stream.request_id}", stream.model, [], Usage(0, 0))
        return AnthropicEvents(reader_of(call, stream.request_id, stream.chat_format), message, call)


class AnthropicEvents(BlockEvents):
    """The events of Anthropic's messages."""

    def __init__(self, reader: AnswerReader, message: Message, call: ApiCall) -> None:
        """`message`: the message before its first block; `call`: the request."""
        super().__init__(reader)
        self._call = call
        self._message = message
        self._index = -1
        """Index of the last block that has begun."""
        self._uses = False
        """Whether a block is the use of a tool."""

    @override
    def beginning(self, choices: int, prompt_tokens: int | None = None, cached_tokens: int = 0) -> bytes:
        self._message.usage = Usage((prompt_tokens or 0) - cached_tokens, 0, cached_tokens)
        return _event("message_start", message=self._message)

    @override
    def begin_block(self, block: AnswerBlock) -> bytes:
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=_content(block))

    @override
    def grow_block(self, block: AnswerBlock, text: str) -> bytes:
        match block.kind:
            case Kind.REASONING:
                delta = {"type": "thinking_delta", "thinking": text}
            case Kind.CONTENT:
                delta = {"type": "text_delta", "text": text}
            case _:
                delta = {"type": "input_json_delta", "partial_json": text}
        return _event("content_block_delta", index=self._index, delta=delta)

    @override
    def end_block(self, block: AnswerBlock, *, cut: bool) -> bytes:
        self._uses = self._uses or _is_use(block)
        return _event("content_block_stop", index=self._index)

    @override
    def finish(self, choice: FinalChoice, final: Final) -> bytes:
        uses = self._reader.calls(choice) and self._uses
        reason, sequence = _stop(choice, final.usage, self._call, uses=uses)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return _event("message_delta", delta=delta, usage=_usage(final.usage)) + _event("message_stop")

    @override
    def failed(self, error: PagewireError) -> bytes:
        return sse(errors.body_of(error, errors.MESSAGES)[1], "error")


def _event(name: str, /, **fields: object) -> bytes:
    return sse(_encode({"type": name, **fields}), name)


def _is_use(block: AnswerBlock) -> bool:
    """Returns whether a block is a call of a tool that a client can make."""
    return block.kind is Kind.NAME and block.arguments is not None


def _contents(blocks: Iterable[AnswerBlock]) -> list[Content]:
    """Returns the blocks of a message. A call without its end is left out: no schema would take what there is of it."""
    return [content for block in blocks if (content := _content(block)) is not None]


def _content(block: AnswerBlock) -> Content | None:
    match block.kind:
        case Kind.REASONING:
            return ThinkingContent(block.text)
        case Kind.CONTENT:
            return TextContent(block.text)
        case _:
            arguments = block.arguments
            return None if arguments is None else ToolUseContent(block.call_id, block.name, arguments)


def _stop(end: Choice | FinalChoice, usage: wire.Usage, call: ApiCall, *, uses: bool) -> tuple[str, str | None]:
    """Returns why a message ends, and the stop sequence that ends it. `uses`: whether it ends with the use of a tool.

    Anthropic's models of today take a `max_tokens` beyond the context, and say so where the context ends the message.
    """
    if uses:
        return "tool_use", None
    if end.finish_reason == "stop" and isinstance(end.stop_reason, str):
        return "stop_sequence", end.stop_reason
    if end.finish_reason != "length":
        return "end_turn", None
    cut = usage.completion_tokens < call.arguments["max_tokens"]
    return "model_context_window_exceeded" if cut else "max_tokens", None


def _usage(usage: wire.Usage) -> Usage:
    cached = usage.cached_tokens
    return Usage(usage.prompt_tokens - cached, usage.completion_tokens, cached)
