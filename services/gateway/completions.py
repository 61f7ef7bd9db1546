"""The endpoint `/v1/completions`: turns each HTTP request into one request to the pipeline."""

import time
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagewire.client.async_client import AsyncClient
from pagewire.client.stream import Stream
from pagewire.services.gateway import errors
from pagewire.services.gateway.connection import ClientGone, read_body, while_connected
from pagewire.services.gateway.events import DONE, Events, event
from pagewire.services.gateway.request import CompletionRequest, StreamOptions, decode, sampling
from pagewire.services.gateway.shapes import Choice, Completion, usage_of
from pagewire.shared.errors import PagewireError
from pagewire.shared.messages.client import Delta

TIMEOUT = 600.0
"""Deadline of a request over HTTP, in seconds."""

_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_encode = msgspec.json.Encoder().encode


class Completions:
    """ASGI endpoint.

    Attributes:
        running: number of requests in progress.
        served: number of requests that have ended.
    """

    def __init__(self, client: AsyncClient, body_limit: int) -> None:
        self._client = client
        self._body_limit = body_limit
        self.running = 0
        self.served = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        self.running += 1
        try:
            request = decode(await read_body(receive, self._body_limit))
            stream = self._stream(request, _traceparent(scope))
            async with while_connected(receive):
                if request.stream:
                    await _send_events(stream, send, request.stream_options or StreamOptions())
                else:
                    await _send_whole(stream, scope, receive, send)
        except ClientGone:
            pass
        except PagewireError as error:
            await errors.response(error)(scope, receive, send)
        finally:
            self.running -= 1
            self.served += 1

    def _stream(self, request: CompletionRequest, traceparent: str) -> Stream:
        return self._client.stream(
            request.prompt,
            sampling(request),
            model=request.model or "",
            request_id=request.request_id or "",
            priority=request.priority or 0,
            user=request.user or "",
            cache_salt=request.cache_salt or "",
            timeout=TIMEOUT,
            traceparent=traceparent,
        )


async def _send_whole(stream: Stream, scope: Scope, receive: Receive, send: Send) -> None:
    result = await stream.result()
    answer = Completion(
        id=f"cmpl-{stream.request_id}",
        created=int(time.time()),
        model=stream.model,
        choices=[
            Choice(choice.index, choice.text, finish_reason=choice.finish_reason, stop_reason=choice.stop_reason)
            for choice in result.choices
        ],
        usage=usage_of(result.usage),
    )
    await Response(_encode(answer), media_type="application/json")(scope, receive, send)


async def _send_events(stream: Stream, send: Send, options: StreamOptions) -> None:
    """Sends events, or the status of an error before the first token. While a slow reader makes `send` wait, the stream
    merges the deltas that arrive."""
    async with aclosing(stream.batches()) as batches:
        first: list[Delta] = await anext(batches, [])
        counted = options.include_usage and options.continuous_usage_stats
        events = Events(stream.request_id, stream.model, counted=counted)
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
        try:
            if body := events.texts(first, stream.prompt_tokens):
                await send({"type": "http.response.body", "body": body, "more_body": True})
            async for batch in batches:
                if body := events.texts(batch, stream.prompt_tokens):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        except PagewireError as error:
            end = event(errors.body_of(error)[1])
        else:
            assert stream.final is not None
            end = events.ends(stream.final, usage=options.include_usage)
    await send({"type": "http.response.body", "body": end + DONE})


def _traceparent(scope: Scope) -> str:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    return next((value.decode("ascii", "replace") for name, value in headers if name == b"traceparent"), "")
