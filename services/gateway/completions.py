"""`/v1/completions`."""

import time

from pagewire.client.stream import Stream
from pagewire.services.gateway.endpoint import Call
from pagewire.services.gateway.events import CompletionEvents
from pagewire.services.gateway.request import decode
from pagewire.services.gateway.shapes import Choice, Completion, usage_of
from pagewire.shared.messages.client import Result


class Completions:
    """The `Api` of OpenAI's completions."""

    def read(self, body: bytes) -> Call:
        """See `Api.read`."""
        request, sampling = decode(body)
        arguments = {
            "prompt": request.prompt,
            "model": request.model,
            "request_id": request.request_id,
            "priority": request.priority,
            "user": request.user,
            "cache_salt": request.cache_salt,
            **sampling,
        }
        return Call(arguments, request.stream, request.stream_options, sampling.get("n", 1))

    def answer(self, stream: Stream, result: Result) -> Completion:
        """See `Api.answer`."""
        return Completion(
            id=f"cmpl-{stream.request_id}",
            created=int(time.time()),
            model=stream.model,
            choices=[
                Choice(choice.index, choice.text, finish_reason=choice.finish_reason, stop_reason=choice.stop_reason)
                for choice in result.choices
            ],
            usage=usage_of(result.usage),
        )

    def events(self, stream: Stream, *, counted: bool) -> CompletionEvents:
        """See `Api.events`."""
        return CompletionEvents(stream.request_id, stream.model, counted=counted)
