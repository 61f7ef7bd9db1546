"""Ollama's `/api/chat` and `/api/generate`, as forms of a chat; a raw prompt is a completion."""

from typing import ClassVar

from typing_extensions import override

from pagewire.client.async_client import AsyncClient
from pagewire.client.stream import Stream
from pagewire.services.gateway.answers.logprobs import chat_logprobs
from pagewire.services.gateway.answers.ollama_lines import OllamaLines, message_of
from pagewire.services.gateway.answers.ollama_shapes import (
    OllamaAnswer,
    OllamaChatAnswer,
    OllamaGenerateAnswer,
    OllamaMessage,
)
from pagewire.services.gateway.requests import chat_request, completion_request, ollama_request
from pagewire.services.gateway.requests.ollama_request import OllamaChatRequest, OllamaGenerateRequest
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.services.gateway.routes import chat_completions, completions
from pagewire.services.gateway.routes.chat_completions import reader_of
from pagewire.services.gateway.routes.endpoint import Api, ApiCall
from pagewire.shared.messages.client import Result

LATEST = ":latest"
"""The tag that Ollama's clients add to a name without one."""


class OllamaApi(Api):
    """The part that both routes share; a subclass names the request and the shape of its answer."""

    request: ClassVar[type[OllamaChatRequest | OllamaGenerateRequest]]
    shape: ClassVar[type[OllamaAnswer]]

    @override
    def read(self, body: bytes, unknown: UnknownFields) -> ApiCall:
        request = ollama_request.decode(body, self.request, unknown)
        if ollama_request.loads(request):
            return _loading(request.model, streamed=request.stream)
        if isinstance(request, OllamaGenerateRequest) and request.raw:
            fields = ollama_request.completion_fields(request, unknown)
            call = completions.call_of(*completion_request.of_fields(fields))
        else:
            fields = ollama_request.chat_fields(request, unknown)
            call = chat_completions.call_of(*chat_request.of_fields(fields))
        call.arguments.setdefault("max_tokens", None)
        call.arguments["clamp_max_tokens"] = True
        return call

    @override
    async def complete(self, client: AsyncClient, call: ApiCall) -> ApiCall:
        call.arguments["model"] = await served_name(client, call.arguments["model"])
        return call

    @override
    async def answer(self, client: AsyncClient, call: ApiCall, stream: Stream, result: Result) -> OllamaAnswer:
        if call.drops_token:
            answer = self.shape.of(stream.model, OllamaMessage())
            answer.end_load()
            return answer
        (choice,) = result.choices
        reader = reader_of(call, stream.request_id, result.chat_format)
        answer = self.shape.of(stream.model, message_of(choice, reader))
        if choice.logprobs is not None:
            answer.logprobs = chat_logprobs(choice.logprobs, _top_logprobs(call)).content
        answer.end(choice, result.usage, result.metrics)
        return answer

    @override
    async def events(self, client: AsyncClient, call: ApiCall, stream: Stream, *, counted: bool) -> OllamaLines:
        reader = reader_of(call, stream.request_id, stream.chat_format)
        return OllamaLines(reader, self.shape, stream.model, _top_logprobs(call), loads=call.drops_token)


class OllamaChat(OllamaApi):
    """`/api/chat`."""

    request = OllamaChatRequest
    shape = OllamaChatAnswer


class OllamaGenerate(OllamaApi):
    """`/api/generate`."""

    request = OllamaGenerateRequest
    shape = OllamaGenerateAnswer


async def served_name(client: AsyncClient, name: str) -> str:
    """Returns the served name that a client means: the name itself, or the one without the tag `:latest`."""
    if not name.endswith(LATEST) or any(info.name == name for info in await client.models()):
        return name
    return name.removesuffix(LATEST)


def _loading(model: str, *, streamed: bool) -> ApiCall:
    """Returns the call that loads a model: one token, which is dropped."""
    request = completion_request.CompletionRequest(prompt=".", model=model, stream=streamed, drops_token=True)
    return completions.call_of(request, {"max_tokens": 1})


def _top_logprobs(call: ApiCall) -> int:
    return int(call.arguments.get("logprobs") or 0)
