"""`/v1/chat/completions`."""

import time
from typing import Any

import msgspec
from typing_extensions import override

from pagewire.client.async_client import AsyncClient
from pagewire.client.stream import Stream
from pagewire.services.gateway.answers.answer_reader import AnswerReader
from pagewire.services.gateway.answers.chat_messages import finish_reason_of, message_of
from pagewire.services.gateway.answers.logprobs import chat_logprobs
from pagewire.services.gateway.answers.openai_events import ChatEvents
from pagewire.services.gateway.answers.openai_shapes import ChatChoice, ChatCompletion, metrics_of, timings_of, usage_of
from pagewire.services.gateway.answers.parsed_chat_events import ParsedChatEvents
from pagewire.services.gateway.requests.chat_request import ChatCompletionRequest, decode
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.services.gateway.routes.endpoint import Api, ApiCall, event_fields, passed_fields
from pagewire.shared.messages.client import ChatFormat, Result


class ChatCompletions(Api):
    """OpenAI's chat completions."""

    @override
    def read(self, body: bytes, unknown: UnknownFields) -> ApiCall:
        return call_of(*decode(body, unknown))

    @override
    async def answer(self, client: AsyncClient, call: ApiCall, stream: Stream, result: Result) -> ChatCompletion:
        reader = reader_of(call, stream.request_id, result.chat_format)
        answer = ChatCompletion(
            id=f"chatcmpl-{stream.request_id}",
            created=int(time.time()),
            model=stream.model,
            choices=[
                ChatChoice(
                    choice.index,
                    message_of(choice, reader),
                    None if choice.logprobs is None else chat_logprobs(choice.logprobs, call.top_logprobs),
                    finish_reason=finish_reason_of(choice, reader),
                    stop_reason=choice.stop_reason,
                    token_ids=choice.token_ids if call.token_ids else msgspec.UNSET,
                )
                for choice in result.choices
            ],
            usage=usage_of(result.usage),
            timings=timings_of(result.metrics, result.usage),
            metrics=metrics_of(result.metrics, len(result.choices), shown=call.metrics),
        )
        if call.token_ids:
            answer.prompt_token_ids = (result.prompt_token_ids or [])[0]
        if result.prompt_logprobs is not None:
            answer.prompt_logprobs = result.prompt_logprobs[0]
        return answer

    @override
    async def events(self, client: AsyncClient, call: ApiCall, stream: Stream, *, counted: bool) -> ChatEvents:
        fields = event_fields(call, stream, counted=counted)
        if stream.chat_format is None:
            return ChatEvents(stream.request_id, stream.model, fields, call.top_logprobs)
        reader = reader_of(call, stream.request_id, stream.chat_format)
        return ParsedChatEvents(stream.request_id, stream.model, reader, fields, call.top_logprobs)


def call_of(request: ChatCompletionRequest, sampling: dict[str, Any]) -> ApiCall:
    """Returns the call of a chat, whose sampling fields are `sampling`."""
    arguments = {
        **passed_fields(request),
        "messages": request.messages,
        "add_generation_prompt": request.add_generation_prompt,
        "continue_final_message": request.continue_final_message,
        "chat_template_kwargs": request.chat_template_kwargs,
        "tools": request.tools,
        "tool_choice": request.tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        **sampling,
    }
    return ApiCall(
        arguments,
        request.stream,
        request.stream_options,
        sampling.get("n", 1),
        top_logprobs=request.top_logprobs,
        reasoning=request.include_reasoning,
        token_ids=request.return_token_ids,
    )


def reader_of(call: ApiCall, request_id: str, form: ChatFormat | None) -> AnswerReader:
    """Returns the reader of the answers to a chat."""
    return AnswerReader(request_id, form, reasoning=call.reasoning)
