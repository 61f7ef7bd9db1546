"""`/v1/completions`."""

import time
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from pagewire.client.async_client import AsyncClient
from pagewire.client.stream import Stream
from pagewire.services.gateway.answers.echo_events import Echo, EchoEvents
from pagewire.services.gateway.answers.logprobs import completion_logprobs, echoed_logprobs, joined
from pagewire.services.gateway.answers.openai_events import CompletionEvents
from pagewire.services.gateway.answers.openai_shapes import (
    Completion,
    CompletionChoice,
    metrics_of,
    timings_of,
    usage_of,
)
from pagewire.services.gateway.requests.completion_request import CompletionRequest, decode
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.services.gateway.routes.endpoint import Api, ApiCall, event_fields, passed_fields
from pagewire.shared.messages.client import Result


class Completions(Api):
    """OpenAI's completions."""

    @override
    def read(self, body: bytes, unknown: UnknownFields) -> ApiCall:
        return call_of(*decode(body, unknown))

    @override
    async def answer(self, client: AsyncClient, call: ApiCall, stream: Stream, result: Result) -> Completion:
        if call.drops_token:
            result.usage.completion_tokens = 0
        prompts = await _texts(client, call.arguments["prompt"], stream.model) if call.echo else []
        firsts = [""] * len(prompts)
        if call.echo and result.prompt_token_ids is not None:
            firsts = [await client.detokenize(ids[:1], stream.model) for ids in result.prompt_token_ids]
        choices = []
        for choice in result.choices:
            prompt = choice.index // call.choices
            text, tokens = choice.text, choice.logprobs
            if call.drops_token:
                text, tokens = "", None if tokens is None else []
            offset = len(prompts[prompt]) if call.echo else 0
            logprobs = None if tokens is None else completion_logprobs(tokens, offset)
            if call.echo and result.prompt_logprobs is not None and logprobs is not None:
                logprobs = joined(echoed_logprobs(firsts[prompt], result.prompt_logprobs[prompt]), logprobs)
            answer = CompletionChoice(
                choice.index,
                prompts[prompt] + text if call.echo else text,
                logprobs,
                finish_reason="length" if call.drops_token else choice.finish_reason,
                stop_reason=None if call.drops_token else choice.stop_reason,
            )
            if result.prompt_logprobs is not None:
                answer.prompt_logprobs = result.prompt_logprobs[prompt]
            if call.token_ids:
                answer.token_ids = [] if call.drops_token else choice.token_ids
                answer.prompt_token_ids = (result.prompt_token_ids or [])[prompt]
            choices.append(answer)
        return Completion(
            id=f"cmpl-{stream.request_id}",
            created=int(time.time()),
            model=stream.model,
            choices=choices,
            usage=usage_of(result.usage),
            timings=timings_of(result.metrics, result.usage),
            metrics=metrics_of(result.metrics, len(result.choices), shown=call.metrics),
        )

    @override
    async def events(self, client: AsyncClient, call: ApiCall, stream: Stream, *, counted: bool) -> CompletionEvents:
        fields = event_fields(call, stream, counted=counted)
        if not call.echo:
            return CompletionEvents(stream.request_id, stream.model, fields)
        firsts = None
        if fields.prompt_logprobs:
            firsts = [await client.detokenize(ids[:1], stream.model) for ids in stream.prompt_token_ids]
        echo = Echo(await _texts(client, call.arguments["prompt"], stream.model), firsts)
        return EchoEvents(stream.request_id, stream.model, fields, echo, drops_token=call.drops_token)


def call_of(request: CompletionRequest, sampling: dict[str, Any]) -> ApiCall:
    """Returns the call of a completion, whose sampling fields are `sampling`."""
    arguments = {
        **passed_fields(request),
        "prompt": request.prompt,
        "return_token_ids": request.return_token_ids or (request.echo and "prompt_logprobs" in sampling),
        **sampling,
    }
    return ApiCall(
        arguments,
        request.stream,
        request.stream_options,
        sampling.get("n", 1),
        echo=request.echo,
        drops_token=request.drops_token,
        token_ids=request.return_token_ids,
    )


async def _texts(client: AsyncClient, prompt: str | Sequence[Any], model: str) -> list[str]:
    """Returns the text of each prompt of a request."""
    if isinstance(prompt, str):
        return [prompt]
    several: Sequence[Any] = [prompt] if prompt and isinstance(prompt[0], int) else prompt
    return [one if isinstance(one, str) else await client.detokenize(one, model) for one in several]
