"""OpenAI's `/v1/responses`, as a form of a chat. Nothing is stored."""

import time
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

from pagewire.client.async_client import AsyncClient
from pagewire.client.stream import Stream
from pagewire.services.gateway.http import errors
from pagewire.services.gateway.requests.responses_request import chat_body, decode
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
from pagewire.shared.errors import PagewireError
from pagewire.shared.messages import client as wire
from pagewire.shared.messages.client import Delta, Final, Result

_encode = msgspec.json.Encoder().encode
ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "tool_choice", "tools", "top_p")
"""Fields of a request that its response repeats."""
Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(msgspec.Struct, tag="output_text"):
    """A text of the answer."""

    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[Any] = msgspec.field(default_factory=list)


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    """Reasoning before the answer."""

    text: str


class OutputMessage(msgspec.Struct, tag="message"):
    """A message of the answer."""

    id: str
    content: list[OutputText]
    status: Status = "completed"
    role: Literal["assistant"] = "assistant"


class ReasoningItem(msgspec.Struct, tag="reasoning"):
    """The reasoning before the answer."""

    id: str
    content: list[ReasoningText]
    summary: list[Any] = msgspec.field(default_factory=list)
    status: Status = "completed"


class FunctionCall(msgspec.Struct, tag="function_call"):
    """A call of a tool."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Status = "completed"


Item = OutputMessage | ReasoningItem | FunctionCall


class CachedTokens(msgspec.Struct):
    """Details of the input's tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ReasoningTokens(msgspec.Struct):
    """Details of the output's tokens."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    """Number of tokens that a request used."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    total_tokens: int
    output_tokens_details: ReasoningTokens = msgspec.field(default_factory=ReasoningTokens)


class ModelResponse(msgspec.Struct, kw_only=True):
    """The response to a responses request. The fields of the request are repeated in it."""

    id: str
    created_at: int
    model: str
    status: Status = "in_progress"
    output: list[Item] = msgspec.field(default_factory=list)
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
    """Once the response has ended."""
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: dict[str, Any] | None = None
    store: Literal[False] = False
    temperature: float | None = None
    text: dict[str, Any] = msgspec.field(default_factory=lambda: {"format": {"type": "text"}})
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"
    object: Literal["response"] = "response"


class Responses:
    """The `Api` of OpenAI's responses."""

    def read(self, body: bytes, unknown: UnknownFields) -> Call:
        """See `Api.read`."""
        request, passed = decode(body, unknown)
        call = read_chat(chat_body(request) | passed, unknown)
        given = {name: getattr(request, name) for name in ECHOED}
        call.echoed.update({name: value for name, value in given.items() if value is not None})
        if request.tools:
            call.echoed["tools"] = [{"parameters": None, "strict": None, **tool} for tool in request.tools]
        call.echoed["parallel_tool_calls"] = request.parallel_tool_calls
        if request.text.format is not None:
            call.echoed["text"] = {"format": request.text.format}
        return call

    async def answer(self, client: AsyncClient, call: Call, stream: Stream, result: Result) -> ModelResponse:
        """See `Api.answer`."""
        *parts, end = parts_of(await CHAT.answer(client, call, stream, result))
        response = _response(call, stream)
        blocks: list[Block] = []
        for part in parts or [AnswerPart("text")]:
            if not blocks or not blocks[-1].takes(part):
                blocks.append(Block(part))
            blocks[-1].texts.append(part.text)
        response.output = [_item(block, stream.request_id, number) for number, block in enumerate(blocks)]
        _finish(response, end, result.usage)
        return response

    async def events(self, client: AsyncClient, call: Call, stream: Stream, *, counted: bool) -> EventStream:
        """See `Api.events`."""
        del counted
        return ResponseEvents(await chat_events(client, call, stream), _response(call, stream), stream.request_id)


class ResponseEvents:
    """The `EventStream` of OpenAI's responses: an item of the output begins, grows and ends, then the next one."""

    done: ClassVar[bytes] = b""

    def __init__(self, chat: EventStream, response: ModelResponse, request_id: str) -> None:
        """`chat`: the events of the chat path."""
        self._chat = chat
        self._response = response
        self._request_id = request_id
        self._block: Block | None = None
        self._number = 0

    def beginning(self, choices: int, prompt_tokens: int | None = None) -> bytes:
        """Returns the events that the response begins."""
        del choices, prompt_tokens
        return b"".join(
            self._event(name, response=self._response) for name in ("response.created", "response.in_progress")
        )

    def texts(self, batch: Sequence[Delta], prompt_tokens: int | None = None) -> bytes:
        """Returns the events of deltas."""
        return self._parts(self._chat.texts(batch, prompt_tokens))

    def ends(self, final: Final, *, usage: bool) -> bytes:
        """Returns the rest of the response, and the whole of it."""
        del usage
        return self._parts(self._chat.ends(final, usage=False), final)

    def failed(self, error: PagewireError) -> bytes:
        """Returns the event of an error."""
        _, body = errors.body_of(error)
        found = msgspec.json.decode(body)["error"]
        return self._event("error", code=found["code"], message=found["message"], param=found["param"], error=found)

    def _event(self, name: str, /, **fields: object) -> bytes:
        body = _encode({"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"

    def _parts(self, events: bytes, final: Final | None = None) -> bytes:
        found = []
        for part in parts_in(events):
            if part.kind == "end":
                assert final is not None
                if self._block is None:
                    found.append(self._begin(AnswerPart("text")))
                found.append(self._end_block())
                _finish(self._response, part, final.usage)
                name = "response.completed" if self._response.status == "completed" else "response.incomplete"
                found.append(self._event(name, response=self._response))
                continue
            if self._block is None or not self._block.takes(part):
                found += [self._end_block(), self._begin(part)]
            found.append(self._continue_block(part))
        return b"".join(found)

    @property
    def _place(self) -> dict[str, object]:
        """Where the open item is, for its events."""
        index = len(self._response.output)
        return {"item_id": _item_id(self._block, self._request_id, index), "output_index": index}

    def _begin(self, part: AnswerPart) -> bytes:
        self._block = Block(part)
        index = len(self._response.output)
        item = _item(self._block, self._request_id, index)
        item.status = "in_progress"
        if not isinstance(item, FunctionCall):
            item.content = []
        begun = self._event("response.output_item.added", output_index=index, item=item)
        if part.kind == "call":
            return begun
        return begun + self._event(
            "response.content_part.added", **self._place, content_index=0, part=_content_part(part.kind, "")
        )

    def _continue_block(self, part: AnswerPart) -> bytes:
        assert self._block is not None
        self._block.texts.append(part.text)
        if part.kind == "call":
            if not part.text:
                return b""
            return self._event("response.function_call_arguments.delta", **self._place, delta=part.text)
        name = "response.output_text.delta" if part.kind == "text" else "response.reasoning_text.delta"
        more: dict[str, object] = {"logprobs": []} if part.kind == "text" else {}
        return self._event(name, **self._place, content_index=0, delta=part.text, **more)

    def _end_block(self) -> bytes:
        block = self._block
        if block is None:
            return b""
        place, text = self._place, block.text
        item = _item(block, self._request_id, len(self._response.output))
        if isinstance(item, FunctionCall):
            ended = self._event("response.function_call_arguments.done", **place, name=item.name, arguments=text)
        else:
            part = _content_part(block.first.kind, text)
            name = "output_text" if block.first.kind == "text" else "reasoning_text"
            more: dict[str, object] = {"logprobs": []} if block.first.kind == "text" else {}
            ended = self._event(f"response.{name}.done", **place, content_index=0, text=text, **more)
            ended += self._event("response.content_part.done", **place, content_index=0, part=part)
        ended += self._event("response.output_item.done", output_index=place["output_index"], item=item)
        self._response.output.append(item)
        self._block = None
        return ended


def _response(call: Call, stream: Stream) -> ModelResponse:
    return ModelResponse(id=f"resp_{stream.request_id}", created_at=int(time.time()), model=stream.model, **call.echoed)


def _content_part(kind: str, text: str) -> OutputText | ReasoningText:
    return OutputText(text) if kind == "text" else ReasoningText(text)


def _item_id(block: Block | None, request_id: str, index: int) -> str:
    prefixes = {"text": "msg", "reasoning": "rs", "call": "fc"}
    return f"{prefixes[block.first.kind if block else 'text']}_{request_id}_{index}"


def _item(block: Block, request_id: str, index: int) -> Item:
    number, text, first = _item_id(block, request_id, index), block.text, block.first
    if first.kind == "call":
        return FunctionCall(number, first.call_id, first.name, text)
    if first.kind == "reasoning":
        return ReasoningItem(number, [ReasoningText(text)])
    return OutputMessage(number, [OutputText(text)])


def _finish(response: ModelResponse, end: AnswerPart, usage: wire.Usage) -> None:
    """Fills in why a response ends, and its usage."""
    response.status = "incomplete" if end.finish_reason == "length" else "completed"
    if response.status == "incomplete":
        response.incomplete_details = {"reason": "max_output_tokens"}
        if response.output:
            response.output[-1].status = "incomplete"
    response.usage = Usage(
        usage.prompt_tokens,
        CachedTokens(usage.cached_tokens),
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
    )
