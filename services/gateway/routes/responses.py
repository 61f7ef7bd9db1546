"""OpenAI's `/v1/responses`, as a form of a chat. Nothing is stored."""

import time
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
from pagewire.services.gateway.requests.responses_request import chat_fields, decode
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.services.gateway.routes.chat_completions import call_of, reader_of
from pagewire.services.gateway.routes.endpoint import Api, ApiCall
from pagewire.shared.chat.parts import Kind
from pagewire.shared.errors import PagewireError
from pagewire.shared.messages import client as wire
from pagewire.shared.messages.client import Choice, FinalChoice, Result

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


class Responses(Api):
    """OpenAI's responses."""

    @override
    def read(self, body: bytes, unknown: UnknownFields) -> ApiCall:
        request, passed = decode(body, unknown)
        call = call_of(*chat_request.of_fields(chat_fields(request) | passed))
        fields = {name: getattr(request, name) for name in ECHOED}
        call.echoed.update({name: value for name, value in fields.items() if value is not None})
        if request.tools:
            call.echoed["tools"] = [{"parameters": None, "strict": None, **tool} for tool in request.tools]
        call.echoed["parallel_tool_calls"] = request.parallel_tool_calls
        if request.text.format is not None:
            call.echoed["text"] = {"format": request.text.format}
        return call

    @override
    async def answer(self, client: AsyncClient, call: ApiCall, stream: Stream, result: Result) -> ModelResponse:
        reader = reader_of(call, stream.request_id, result.chat_format)
        response = _response(call, stream)
        (choice,) = result.choices
        blocks = enumerate(reader.blocks(choice))
        response.output = [_item(block, _item_id(block, stream.request_id, index)) for index, block in blocks]
        _finish(response, choice, result.usage)
        return response

    @override
    async def events(self, client: AsyncClient, call: ApiCall, stream: Stream, *, counted: bool) -> EventStream:
        reader = reader_of(call, stream.request_id, stream.chat_format)
        return ResponseEvents(reader, _response(call, stream), stream.request_id)


class ResponseEvents(BlockEvents):
    """The events of OpenAI's responses: each block is an item of the output."""

    def __init__(self, reader: AnswerReader, response: ModelResponse, request_id: str) -> None:
        """`response`: the response before its first item."""
        super().__init__(reader)
        self._response = response
        self._request_id = request_id
        self._number = 0
        """Number of the next event."""

    @override
    def beginning(self, choices: int, prompt_tokens: int | None = None) -> bytes:
        names = ("response.created", "response.in_progress")
        return b"".join(self._event(name, response=self._response) for name in names)

    @override
    def begin_block(self, block: AnswerBlock) -> bytes:
        place = self._place(block)
        item = _item(block, place["item_id"])
        item.status = "in_progress"
        if not isinstance(item, FunctionCall):
            item.content = []
        added = self._event("response.output_item.added", output_index=place["output_index"], item=item)
        if isinstance(item, FunctionCall):
            return added
        return added + self._event("response.content_part.added", **place, content_index=0, part=_content(block))

    @override
    def grow_block(self, block: AnswerBlock, text: str) -> bytes:
        place = self._place(block)
        match block.kind:
            case Kind.CONTENT:
                return self._event("response.output_text.delta", **place, content_index=0, delta=text, logprobs=[])
            case Kind.REASONING:
                return self._event("response.reasoning_text.delta", **place, content_index=0, delta=text)
            case _:
                return self._event("response.function_call_arguments.delta", **place, delta=text)

    @override
    def end_block(self, block: AnswerBlock) -> bytes:
        place, text = self._place(block), block.text
        item = _item(block, place["item_id"])
        match block.kind:
            case Kind.CONTENT:
                done = self._event("response.output_text.done", **place, content_index=0, text=text, logprobs=[])
            case Kind.REASONING:
                done = self._event("response.reasoning_text.done", **place, content_index=0, text=text)
            case _:
                done = self._event("response.function_call_arguments.done", **place, name=block.name, arguments=text)
        if not isinstance(item, FunctionCall):
            done += self._event("response.content_part.done", **place, content_index=0, part=_content(block))
        done += self._event("response.output_item.done", output_index=place["output_index"], item=item)
        self._response.output.append(item)
        return done

    @override
    def finish(self, choice: FinalChoice, usage: wire.Usage) -> bytes:
        _finish(self._response, choice, usage)
        return self._event(f"response.{self._response.status}", response=self._response)

    @override
    def failed(self, error: PagewireError) -> bytes:
        detail = errors.detail_of(error)
        return self._event("error", code=detail.code, message=detail.message, param=detail.param, error=detail)

    def _event(self, name: str, /, **fields: object) -> bytes:
        body = _encode({"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        return sse(body, name)

    def _place(self, block: AnswerBlock) -> dict[str, Any]:
        """Returns the fields that say where the item of an open block is."""
        index = len(self._response.output)
        return {"item_id": _item_id(block, self._request_id, index), "output_index": index}


def _response(call: ApiCall, stream: Stream) -> ModelResponse:
    return ModelResponse(id=f"resp_{stream.request_id}", created_at=int(time.time()), model=stream.model, **call.echoed)


def _content(block: AnswerBlock) -> OutputText | ReasoningText:
    return OutputText(block.text) if block.kind is Kind.CONTENT else ReasoningText(block.text)


def _item_id(block: AnswerBlock, request_id: str, index: int) -> str:
    prefixes = {Kind.CONTENT: "msg", Kind.REASONING: "rs", Kind.NAME: "fc"}
    return f"{prefixes[block.kind]}_{request_id}_{index}"


def _item(block: AnswerBlock, item_id: str) -> Item:
    match block.kind:
        case Kind.CONTENT:
            return OutputMessage(item_id, [OutputText(block.text)])
        case Kind.REASONING:
            return ReasoningItem(item_id, [ReasoningText(block.text)])
        case _:
            return FunctionCall(item_id, block.call_id, block.name, block.text)


def _finish(response: ModelResponse, end: Choice | FinalChoice, usage: wire.Usage) -> None:
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
