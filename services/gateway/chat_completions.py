"""`/v1/chat/completions`."""

import time

from pagewire.client.async_client import AsyncClient
from pagewire.client.stream import Stream
from pagewire.services.gateway.chat_request import decode
from pagewire.services.gateway.endpoint import Call
from pagewire.services.gateway.events import ChatEvents
from pagewire.services.gateway.logprobs import chat_logprobs
from pagewire.services.gateway.message_events import MessageEvents
from pagewire.services.gateway.messages import finish_reason, has_calls, message_of
from pagewire.services.gateway.shapes import ChatChoice, ChatCompletion, usage_of
from pagewire.shared.messages.client import Result


class ChatCompletions:
    """The `Api` of OpenAI's chat completions."""

    def read(self, body: bytes) -> Call:
        """See `Api.read`."""
        request, sampling = decode(body)
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
            **sampling,
        }
        return Call(
            arguments,
            request.stream,
            request.stream_options,
            sampling.get("n", 1),
            top_logprobs=request.top_logprobs,
            reasoning=request.include_reasoning,
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
                )
                for choice in result.choices
            ],
            usage=usage_of(result.usage),
        )
        if result.prompt_logprobs is not None:
            answer.prompt_logprobs = result.prompt_logprobs[0]
        return answer

    def events(self, call: Call, stream: Stream, *, counted: bool) -> ChatEvents:
        """See `Api.events`."""
        top, form = call.top_logprobs, stream.chat_format
        if form is None:
            return ChatEvents(stream.request_id, stream.model, counted=counted, top_logprobs=top)
        return MessageEvents(
            stream.request_id, stream.model, form, counted=counted, top_logprobs=top, reasoning=call.reasoning
        )
