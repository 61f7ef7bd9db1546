"""A route that turns each HTTP request into a request to the pipeline, with a whole answer or a stream of events."""

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
import structlog
from opentelemetry.trace import Span, SpanKind
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagewire.client.async_client import AsyncClient
from pagewire.client.stream import Stream
from pagewire.services.gateway.answers.openai_events import EventFields
from pagewire.services.gateway.answers.sse import EventStream
from pagewire.services.gateway.http import errors
from pagewire.services.gateway.http.connection import ClientGone, read_body, while_connected
from pagewire.services.gateway.http.http_counter import STATUS
from pagewire.services.gateway.http.request_ids import HEADER, client_id_of, new_id
from pagewire.services.gateway.requests.chat_request import ChatCompletionRequest
from pagewire.services.gateway.requests.completion_request import CompletionRequest, StreamOptions
from pagewire.services.gateway.requests.responses_tools import ClientTool
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.services.gateway.routes.request_log import LoggedRequest, RequestLog
from pagewire.shared import subjects
from pagewire.shared.errors import Internal, PagewireError, Unavailable
from pagewire.shared.messages.client import Delta, Result
from pagewire.shared.telemetry import tracing

CLIENT_GONE = 499
"""Status in the log of a request whose client has closed the connection, as nginx writes it."""
DETACHED = "this server has stopped: send the request again, with the same request_id"
"""Message of the error for a reader that a stopped gateway leaves."""
FAULT_MESSAGE = "the request met a fault of the server: its log has the details"
"""Message of the error for a fault of the gateway."""

PASSED_FIELDS = (
    "model",
    "request_id",
    "priority",
    "user",
    "cache_salt",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "return_token_ids",
    "return_token_origins",
)
"""Fields of completions and chats that the pipeline knows by the same names."""

_encode = msgspec.json.Encoder().encode
_log = structlog.get_logger()


class Detached(Unavailable):
    """A request goes on without its reader."""


@dataclass(frozen=True, slots=True)
class ApiCall:
    """A decoded request."""

    arguments: dict[str, Any]
    """Arguments of `AsyncClient.stream`."""
    streamed: bool
    """Whether the answer is a stream of events."""
    options: StreamOptions
    """Options of the stream."""
    choices: int
    """Completions per prompt."""
    echo: bool = False
    """Whether the prompt is part of the text."""
    drops_token: bool = False
    """Whether the one token that is generated is dropped: the answer is the prompt alone, or that a model is loaded."""
    top_logprobs: int = 0
    """Number of the likeliest tokens that a chat shows at each position."""
    reasoning: bool = True
    """Whether the reasoning is part of a chat's answer."""
    token_ids: bool = False
    """Whether token ids are part of the answer."""
    metrics: bool = False
    """Whether the figures of the drafts are part of the answer."""
    echoed: dict[str, Any] = field(default_factory=dict)
    """Fields of the request that are repeated in the answer."""
    client_tools: dict[str, ClientTool] = field(default_factory=dict)
    """Tools of the request by the names of their functions, where a client has other names for them."""


class Api(Protocol):
    """The part of an endpoint that depends on the route."""

    def read(self, body: bytes, unknown: UnknownFields) -> ApiCall:
        """Decodes a request; `unknown` takes the fields that the route does not know.

        Raises:
            InvalidRequest: the body is malformed, or a field is of the wrong type or unsupported.
        """

    async def complete(self, client: AsyncClient, call: ApiCall) -> ApiCall:
        """Returns a call with what only the stack knows, before it is sent."""
        return call

    async def answer(self, client: AsyncClient, call: ApiCall, stream: Stream, result: Result) -> msgspec.Struct:
        """Returns the response to a request without a stream."""

    async def events(self, client: AsyncClient, call: ApiCall, stream: Stream, *, counted: bool) -> EventStream:
        """Returns the events of a stream that has begun; `counted`: whether every event has the usage so far."""


class Endpoint:
    """ASGI endpoint of one route.

    Attributes:
        running: number of requests in progress.
        served: number of requests that have ended.
    """

    def __init__(
        self,
        api: Api,
        client: AsyncClient,
        body_limit: int,
        log: RequestLog | None = None,
        *,
        strict: bool = False,
        metrics: bool = False,
    ) -> None:
        """`log`: keeps the requests of several endpoints. `strict`: whether unknown fields are refused. `metrics`:
        whether answers have the figures of their drafts."""
        self._api = api
        self._client = client
        self._body_limit = body_limit
        self._requests = log or RequestLog()
        self._strict = strict
        self._metrics = metrics
        self._streams: set[Stream] = set()
        """The requests in the pipeline."""
        self.running = 0
        self.served = 0

    def leave(self) -> None:
        """Ends the answers to all requests, which go on in the pipeline until their clients send them again."""
        for stream in self._streams:
            stream.fail(Detached(DETACHED))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        self.running += 1
        client_id = client_id_of(scope)
        fresh_id = new_id(client_id)
        headers = [(HEADER, client_id or fresh_id.encode())]
        began, status, request, result, stream = time.monotonic(), 200, None, None, None
        caller = _trace_headers(scope)
        span = tracing.begin(f"POST {scope['path']}", caller, SpanKind.SERVER)
        traceparent = tracing.traceparent(span) or caller.get("traceparent", "")
        try:
            unknown = UnknownFields(strict=self._strict)
            body = await read_body(scope, receive, self._body_limit)
            call = replace(self._api.read(body, unknown), metrics=self._metrics)
            own_id = _give_id(call, fresh_id)
            headers = [(HEADER, client_id or own_id.encode())]
            tenant = scope.get("tenant", "")
            client = await self._client.for_tenant(tenant)
            call = await self._api.complete(client, call)
            stream = client.stream(traceparent=traceparent, **call.arguments)
            request = self._requests.begin(stream, scope["path"], tenant)
            self._streams.add(stream)
            headers += unknown.headers()
            async with while_connected(receive):
                if call.streamed:
                    await self._send_events(client, stream, call, send, headers, request)
                else:
                    result = await self._send_answer(client, stream, call, send, headers)
        except ClientGone:
            status = CLIENT_GONE
        except Exception as error:  # noqa: BLE001 - the next request shall be served, whatever was wrong with this one
            status = await _fail(error, scope, span, headers, None if request and request.first_token else send)
        finally:
            self.running -= 1
            self.served += 1
            if stream is not None:
                self._streams.discard(stream)
            scope[STATUS] = status
            request_id = self._requests.end(request, status, result)
            _end_span(span, scope["path"], status, request_id)
            _log_answer(scope, request_id, traceparent, began)

    async def _send_answer(
        self,
        client: AsyncClient,
        stream: Stream,
        call: ApiCall,
        send: Send,
        headers: Sequence[tuple[bytes, bytes]],
    ) -> Result:
        """Sends a whole answer; returns the result of the pipeline."""
        result = await stream.result()
        answer = await self._api.answer(client, call, stream, result)
        await _respond(Response(_encode(answer), 200, None, "application/json"), headers, send)
        return result

    async def _send_events(
        self,
        client: AsyncClient,
        stream: Stream,
        call: ApiCall,
        send: Send,
        headers: Sequence[tuple[bytes, bytes]],
        request: LoggedRequest,
    ) -> None:
        """Sends a stream of events. An error before the first token is raised, so that it sets the response's status.

        While the client reads slowly, each `send` waits, and the stream merges the deltas that arrive meanwhile.
        """
        usage = call.options.include_usage
        async with aclosing(stream.batches()) as batches:
            first: list[Delta] = await anext(batches, [])
            counted = usage and call.options.continuous_usage_stats
            events = await self._api.events(client, call, stream, counted=counted)
            request.first_token = time.time()
            own = [(b"content-type", events.media_type), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": [*own, *headers]})
            try:
                cached = first[0].cached_tokens or 0 if first else 0
                beginning = events.beginning(call.choices, stream.prompt_tokens, cached)
                if body := beginning + events.texts(first, stream.prompt_tokens):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                async for batch in batches:
                    if body := events.texts(batch, stream.prompt_tokens):
                        await send({"type": "http.response.body", "body": body, "more_body": True})
            except Detached:  # a client whose connection breaks sends the request again
                raise
            except PagewireError as error:
                end = events.failed(error)
            else:
                assert stream.final is not None
                end = events.ends(stream.final, usage=usage)
        await send({"type": "http.response.body", "body": end + events.done})


def passed_fields(request: CompletionRequest | ChatCompletionRequest) -> dict[str, Any]:
    """Returns the arguments of `AsyncClient.stream` that completions and chats pass on."""
    return {name: getattr(request, name) for name in PASSED_FIELDS} | {"timeout": request.timeout_ms / 1000}


def _give_id(call: ApiCall, fresh_id: str) -> str:
    """Gives a request the fresh id, unless its body has one; returns the id that the answer's header has.

    Who chooses the id may send the request again when the connection breaks.
    """
    body_id: str = call.arguments["request_id"]
    call.arguments.update({"repeatable": True} if body_id else {"request_id": fresh_id, "fresh": True})
    return body_id if subjects.is_token(body_id) else fresh_id  # the pipeline refuses an id that is no token


def event_fields(call: ApiCall, stream: Stream, *, counted: bool) -> EventFields:
    """Returns the fields of the events that answer a call of OpenAI's."""
    return EventFields(
        counted=counted,
        logprobs="logprobs" in call.arguments,
        prompt_ids=stream.prompt_token_ids if call.token_ids else None,
        prompt_logprobs="prompt_logprobs" in call.arguments,
        metrics=call.metrics,
        origins=bool(call.arguments.get("return_token_origins")),
    )


async def _fail(
    error: Exception, scope: Scope, span: Span, headers: Sequence[tuple[bytes, bytes]], send: Send | None
) -> int:
    """Answers a request that has failed, unless its answer has begun, which has no `send`; returns the status."""
    if not isinstance(error, PagewireError):
        _log.error("request_failed", exc_info=error)
        error = Internal(FAULT_MESSAGE)
    tracing.fail(span, error)
    response = errors.response(error, scope["path"])
    if send is not None:
        await _respond(response, headers, send)
    return response.status_code


async def _respond(response: Response, headers: Sequence[tuple[bytes, bytes]], send: Send) -> None:
    """Sends a response with more headers."""
    response.raw_headers.extend(headers)
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})


def _end_span(span: Span, path: str, status: int, request_id: str) -> None:
    """Ends the span of a request, with the attributes of OpenTelemetry's conventions for HTTP."""
    if span.is_recording():
        span.set_attributes(
            {
                "http.request.method": "POST",
                "http.route": path,
                "http.response.status_code": status,
                "request_id": request_id,
            }
        )
    span.end()


def _log_answer(scope: Scope, request_id: str, traceparent: str, began: float) -> None:
    """Logs a request that has ended."""
    _log.info(
        "http_request",
        path=scope["path"],
        status=scope[STATUS],
        request_id=request_id,
        trace_id=tracing.trace_id(traceparent),
        ms=round((time.monotonic() - began) * 1000, 1),
    )


def _trace_headers(scope: Scope) -> dict[str, str]:
    """Returns the header `traceparent`, if the client has sent one."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    return {name.decode(): value.decode("ascii", "replace") for name, value in headers if name == b"traceparent"}
