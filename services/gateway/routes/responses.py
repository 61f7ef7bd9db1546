"""OpenAI's `/v1/responses`, as a form of a chat. Nothing is stored."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
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
from pagewire.services.gateway.requests.responses_tools import ClientTool, custom_input
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.services.gateway.routes.chat_completions import call_of, reader_of
from pagewire.services.gateway.routes.endpoint import Api, ApiCall
from pagewire.shared.chat.parts import Kind
from pagewire.shared.errors import PagewireError
from pagewire.shared.messages import client as wire
from pagewire.shared.messages.client import Choice, Final, FinalChoice, Result

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


class FunctionCall(msgspec.Struct, tag="function_call", omit_defaults=True):
    """A call of a function."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Status
    namespace: str = ""
    """Namespace that the function belongs to; empty: none."""


class CustomToolCall(msgspec.Struct, tag="custom_tool_call", omit_defaults=True):
    """A call of a tool that takes a free text."""

    id: str
    call_id: str
    name: str
    input: str
    status: Status
    namespace: str = ""
    """Namespace that the tool belongs to; empty: none."""


Item = OutputMessage | ReasoningItem | FunctionCall | CustomToolCall


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
        fields, tools = chat_fields(request, unknown)
        call = call_of(*chat_request.of_fields(fields | passed))
        call.client_tools.update(tools.by_function)
        echoed = {name: getattr(request, name) for name in ECHOED}
        call.echoed.update({name: value for name, value in echoed.items() if value is not None})
        if request.tools:
            call.echoed["tools"] = [_echoed_tool(tool) for tool in request.tools]
        call.echoed["parallel_tool_calls"] = request.parallel_tool_calls
        if request.text.format is not None:
            call.echoed["text"] = {"format": request.text.format}
        return call

    @override
    async def answer(self, client: AsyncClient, call: ApiCall, stream: Stream, result: Result) -> ModelResponse:
        reader = reader_of(call, stream.request_id, result.chat_format)
        response = _response(call, stream)
        (choice,) = result.choices
        items = _Items(stream.request_id, call.client_tools)
        response.output = [items.item(block, index, "completed") for index, block in enumerate(reader.blocks(choice))]
        _finish(response, choice, result.usage)
        return response

    @override
    async def events(self, client: AsyncClient, call: ApiCall, stream: Stream, *, counted: bool) -> EventStream:
        reader = reader_of(call, stream.request_id, stream.chat_format)
        return ResponseEvents(reader, _response(call, stream), _Items(stream.request_id, call.client_tools))


class ResponseEvents(BlockEvents):
    """The events of OpenAI's responses: each block is an item of the output."""

    def __init__(self, reader: AnswerReader, response: ModelResponse, items: "_Items") -> None:
        """`response`: the response before its first item."""
        super().__init__(reader)
        self._response = response
        self._items = items
        self._number = 0
        """Number of the next event."""

    @override
    def beginning(self, choices: int, prompt_tokens: int | None = None, cached_tokens: int = 0) -> bytes:
        names = ("response.created", "response.in_progress")
        return b"".join(self._event(name, response=self._response) for name in names)

    @override
    def begin_block(self, block: AnswerBlock) -> bytes:
        item = self._items.item(block, self._index, "in_progress")
        if isinstance(item, OutputMessage | ReasoningItem):
            item.content = []
        added = self._event("response.output_item.added", output_index=self._index, item=item)
        if block.kind is Kind.NAME:
            return added
        return added + self._event("response.content_part.added", **self._place(block), part=_content(block))

    @override
    def grow_block(self, block: AnswerBlock, text: str) -> bytes:
        place = self._place(block)
        match block.kind:
            case Kind.CONTENT:
                return self._event("response.output_text.delta", **place, delta=text, logprobs=[])
            case Kind.REASONING:
                return self._event("response.reasoning_text.delta", **place, delta=text)
            case _ if self._items.is_custom(block):
                return b""  # the text is known once its JSON has ended
            case _:
                return self._event("response.function_call_arguments.delta", **place, delta=text)

    @override
    def end_block(self, block: AnswerBlock, *, cut: bool) -> bytes:
        place, text = self._place(block), block.text
        item = self._items.item(block, self._index, "incomplete" if cut else "completed")
        match item:
            case OutputMessage():
                done = self._event("response.output_text.done", **place, text=text, logprobs=[])
            case ReasoningItem():
                done = self._event("response.reasoning_text.done", **place, text=text)
            case CustomToolCall(input=free):
                done = self._event("response.custom_tool_call_input.delta", **place, delta=free)
                done += self._event("response.custom_tool_call_input.done", **place, input=free)
            case FunctionCall(name=name):
                done = self._event("response.function_call_arguments.done", **place, name=name, arguments=text)
        if block.kind is not Kind.NAME:
            done += self._event("response.content_part.done", **place, part=_content(block))
        done += self._event("response.output_item.done", output_index=self._index, item=item)
        self._response.output.append(item)
        return done

    @override
    def finish(self, choice: FinalChoice, final: Final) -> bytes:
        _finish(self._response, choice, final.usage)
        return self._event(f"response.{self._response.status}", response=self._response)

    @override
    def failed(self, error: PagewireError) -> bytes:
        detail = errors.detail_of(error)
        return self._event("error", code=detail.code, message=detail.message, param=detail.param, error=detail)

    def _event(self, name: str, /, **fields: object) -> bytes:
        body = _encode({"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        return sse(body, name)

    @property
    def _index(self) -> int:
        """Index of the open block's item in the output."""
        return len(self._response.output)

    def _place(self, block: AnswerBlock) -> dict[str, Any]:
        """Returns the fields that say where the text of an open block is."""
        place = {"item_id": self._items.id_of(block, self._index), "output_index": self._index}
        return place if block.kind is Kind.NAME else place | {"content_index": 0}


@dataclass(frozen=True, slots=True)
class _Items:
    """Makes the items of a response's output."""

    request_id: str
    client_tools: Mapping[str, ClientTool]
    """Tools of the request by the name of the function that stands for them."""

    def item(self, block: AnswerBlock, index: int, status: Status) -> Item:
        """Returns the item of a block at an index of the output."""
        item_id = self.id_of(block, index)
        match block.kind:
            case Kind.CONTENT:
                return OutputMessage(item_id, [OutputText(block.text)], status)
            case Kind.REASONING:
                return ReasoningItem(item_id, [ReasoningText(block.text)], status=status)
        tool = self.client_tools.get(block.name, ClientTool(block.name))
        if tool.custom:
            text = "" if status == "in_progress" else custom_input(block.text)
            return CustomToolCall(item_id, block.call_id, tool.name, text, status, tool.namespace)
        return FunctionCall(item_id, block.call_id, tool.name, block.text, status, tool.namespace)

    def id_of(self, block: AnswerBlock, index: int) -> str:
        """Returns the id of the item of a block."""
        prefixes = {Kind.CONTENT: "msg", Kind.REASONING: "rs", Kind.NAME: "ctc" if self.is_custom(block) else "fc"}
        return f"{prefixes[block.kind]}_{self.request_id}_{index}"

    def is_custom(self, block: AnswerBlock) -> bool:
        """Returns whether a block is a call of a tool that takes a free text."""
        return block.name in self.client_tools and self.client_tools[block.name].custom


def _response(call: ApiCall, stream: Stream) -> ModelResponse:
    return ModelResponse(id=f"resp_{stream.request_id}", created_at=int(time.time()), model=stream.model, **call.echoed)


def _echoed_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool as the response repeats it: OpenAI's clients demand two more fields of a function."""
    return {"parameters": None, "strict": None, **tool} if tool.get("type") == "function" else tool


def _content(block: AnswerBlock) -> OutputText | ReasoningText:
    return OutputText(block.text) if block.kind is Kind.CONTENT else ReasoningText(block.text)


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
        ReasoningTokens(usage.reasoning_tokens),
    )
