"""`/v1/completions`: every request over HTTP is one request to the pipeline."""

import time
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagewire.client import AsyncClient
from pagewire.stream import Stream
from services.gateway import errors
from services.gateway.connection import ClientGone, read_body, while_connected
from services.gateway.request import decode, sampling
from services.gateway.shapes import Choice, Completion, usage_of
from shared.errors import PagewireError
from shared.messages.client import Delta

TIMEOUT = 600.0
"""Seconds that a request over HTTP may take."""

_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_encode = msgspec.json.Encoder().encode


class Completions:
    """ASGI endpoint.

    Attributes:
        running: requests at this moment.
        served: requests that have ended.
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
            await self._answer(scope, receive, send)
        except ClientGone:
            pass
        except PagewireError as error:
            await errors.response(error)(scope, receive, send)
        finally:
            self.running -= 1
            self.served += 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode(await read_body(receive, self._body_limit))
        stream = self._client.stream(
            request.prompt,
            sampling(request),
            model=request.model or "",
            request_id=request.request_id or "",
            priority=request.priority or 0,
            user=request.user or "",
            cache_salt=request.cache_salt or "",
            timeout=TIMEOUT,
            traceparent=_traceparent(scope),
        )
        async with while_connected(receive):
            if request.stream:
                wants_usage = request.stream_options is not None and request.stream_options.include_usage
                await _send_events(stream, wants_usage, send)
            else:
                await _send_whole(stream, scope, receive, send)


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


async def _send_events(stream: Stream, wants_usage: bool, send: Send) -> None:
    """Server-sent events. A request that fails before its first token is answered with the status of its error."""
    async with aclosing(stream.batches()) as batches:
        first: list[Delta] = await anext(batches, [])
        event = Completion(id=f"cmpl-{stream.request_id}", created=int(time.time()), model=stream.model, choices=[])
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
        try:
            await _send_body(_deltas(event, first), send)
            async for batch in batches:
                await _send_body(_deltas(event, batch), send)
        except PagewireError as error:
            end = b"data: " + errors.body_of(error)[1] + b"\n\n"
        else:
            end = _ends(event, stream, wants_usage)
    await send({"type": "http.response.body", "body": end + b"data: [DONE]\n\n"})


async def _send_body(body: bytes, send: Send) -> None:
    """Waits while the reader lags; meanwhile the stream merges what arrives."""
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _deltas(event: Completion, batch: list[Delta]) -> bytes:
    """One event per delta that has text."""
    return b"".join([_event(event, [Choice(delta.index, delta.text)]) for delta in batch if delta.text])


def _ends(event: Completion, stream: Stream, wants_usage: bool) -> bytes:
    """One event per completion with the reason of its end, then one with the usage if it is wanted."""
    assert stream.final is not None
    ends = b"".join(
        _event(event, [Choice(choice.index, "", finish_reason=choice.finish_reason, stop_reason=choice.stop_reason)])
        for choice in stream.final.choices
    )
    if not wants_usage:
        return ends
    event.usage = usage_of(stream.final.usage)
    return ends + _event(event, [])


def _event(event: Completion, choices: list[Choice]) -> bytes:
    event.choices = choices
    return b"data: " + _encode(event) + b"\n\n"


def _traceparent(scope: Scope) -> str:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    return next((value.decode("ascii", "replace") for name, value in headers if name == b"traceparent"), "")
