"""`/v1/chat/completions`."""

import time
from typing import Any

import msgspec

from pagewire.client.async_client import AsyncClient
from pagewire.client.stream import Stream
from pagewire.services.gateway.answers.chat_messages import finish_reason, has_calls, message_of
from pagewire.services.gateway.answers.logprobs import chat_logprobs
from pagewire.services.gateway.answers.openai_shapes import ChatChoice, ChatCompletion, timings_of, usage_of
from pagewire.services.gateway.answers.parsed_chat_events import ParsedChatEvents
from pagewire.services.gateway.answers.sse_events import ChatEvents
from pagewire.services.gateway.requests.chat_request import decode
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.services.gateway.routes.endpoint import Call
from pagewire.shared.messages.client import Result


class ChatCompletions:
    """The `Api` of OpenAI's chat completions."""

    def read(self, body: bytes, unknown: UnknownFields) -> Call:
        """See `Api.read`."""
        request, sampling = decode(body, unknown)
        arguments = {
            "messages": request.messages,
            "add_generation_prompt": request.add_generation_prompt,
            "continue_final_message": request.continue_final_message,
            "chat_template_kwargs": request.chat_template_kwargs,
            "tools": request.tools,
            "tool_choice": request.tool_choice,
            "parallel_tool_calls": request.parallel_tool_calls,
            "model": request.model,
            "request_id": request.request_id,
            "priority": request.priority,
            "user": request.user,
            "cache_salt": request.cache_salt,
            "add_special_tokens": request.add_special_tokens,
            "truncate_prompt_tokens": request.truncate_prompt_tokens,
            "return_token_ids": request.return_token_ids,
            **sampling,
        }
        return Call(
            arguments,
            request.stream,
            request.stream_options,
            sampling.get("n", 1),
            top_logprobs=request.top_logprobs,
            reasoning=request.include_reasoning,
            token_ids=request.return_token_ids,
        )

    async def answer(self, client: AsyncClient, call: Call, stream: Stream, result: Result) -> ChatCompletion:
        """See `Api.answer`."""
        del client
        top, form = call.top_logprobs, result.chat_format
        answer = ChatCompletion(
            id=f"chatcmpl-{stream.request_id}",
            created=int(time.time()),
            model=stream.model,
            choices=[
                ChatChoice(
                    choice.index,
                    message := message_of(choice, form, stream.request_id, reasoning=call.reasoning),
                    None if choice.logprobs is None else chat_logprobs(choice.logprobs, top),
                    finish_reason=finish_reason(choice, form, calls=has_calls(message)),
                    stop_reason=choice.stop_reason,
                    token_ids=choice.token_ids if call.token_ids else msgspec.UNSET,
                )
                for choice in result.choices
            ],
            usage=usage_of(result.usage),
            timings=timings_of(result.metrics, result.usage),
        )
        if call.token_ids:
            answer.prompt_token_ids = (result.prompt_token_ids or [])[0]
        if result.prompt_logprobs is not None:
            answer.prompt_logprobs = result.prompt_logprobs[0]
        return answer

    async def events(self, client: AsyncClient, call: Call, stream: Stream, *, counted: bool) -> ChatEvents:
        """See `Api.events`."""
        del client
        shown: dict[str, Any] = {
            "counted": counted,
            "logprobs": "logprobs" in call.arguments,
            "top_logprobs": call.top_logprobs,
            "prompt_ids": stream.prompt_token_ids if call.token_ids else None,
            "prompt_logprobs": "prompt_logprobs" in call.arguments,
        }
        form = stream.chat_format
        if form is None:
            return ChatEvents(stream.request_id, stream.model, **shown)
        return ParsedChatEvents(stream.request_id, stream.model, form, reasoning=call.reasoning, **shown)
