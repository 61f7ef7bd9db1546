"""The routes of the console: its files, the event stream, the waterfall of a request, and faults for demonstrations."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pagewire.services.gateway.console import assets, waterfall
from pagewire.services.gateway.console.feed import Feed, row
from pagewire.services.gateway.http import errors
from pagewire.services.gateway.http.connection import read_body
from pagewire.services.gateway.routes.health import Health
from pagewire.services.gateway.routes.request_log import RequestLog
from pagewire.shared import subjects
from pagewire.shared.bus import Bus
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages import encode
from pagewire.shared.messages.fault import Fault, FaultKind

EVENTS = f"{assets.FOLDER}events"
REQUEST = f"{assets.FOLDER}requests/{{request_id}}"
FAULTS = f"{assets.FOLDER}faults"
BODY_LIMIT = 1000
"""Bytes of a request for a fault."""
Handler = Callable[[Request], Awaitable[Response]]

_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class FaultBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request for a fault."""

    instance: str
    fault: Literal["kill", "freeze", "drain"]


class Console:
    """The page and what feeds it."""

    def __init__(
        self, bus: Bus, health: Health, requests: RequestLog, trace_dir: str = "", *, demo_faults: bool = False
    ) -> None:
        """`trace_dir`: folder of spans; empty: there are none. `demo_faults`: whether pages can cause faults."""
        self._bus = bus
        self._health = health
        self._requests = requests
        self._trace_dir = trace_dir
        self._demo_faults = demo_faults
        self._assets = assets.load()
        self._feed = Feed(bus, health, requests)
        self._reading_spans = asyncio.Lock()

    @property
    def public_paths(self) -> Collection[str]:
        """Paths that need no key: the page asks for one."""
        return self._assets.keys()

    def routes(self) -> Sequence[Route]:
        """Returns the routes."""
        return [
            *[Route(path, self._asset) for path in self._assets],
            Route(EVENTS, _for_own_pages(self._events)),
            Route(REQUEST, _for_own_pages(self._request)),
            Route(FAULTS, _for_own_pages(self._fault), methods=["POST"]),
        ]

    async def run(self) -> None:
        """Feeds open pages until cancelled."""
        await self._feed.run()

    async def _asset(self, request: Request) -> Response:
        return self._assets[request.scope["path"]].answer(request)

    async def _events(self, request: Request) -> Response:
        tenant = _tenant(request)
        headers = {**_HEADERS, "Pagewire-Faults": "1" if self._demo_faults and tenant is None else "0"}
        return StreamingResponse(self._feed.events(tenant), 200, headers, "text/event-stream")

    async def _request(self, request: Request) -> Response:
        """Answers with the figures and stages of a request, which only its owner and operators may see."""
        request_id, tenant = request.path_params["request_id"], _tenant(request)
        entry = self._requests.find(request_id, tenant)
        stages = []
        if self._trace_dir:
            async with self._reading_spans:
                stages = await asyncio.to_thread(waterfall.traced, Path(self._trace_dir), request_id, tenant)
        has_spans = bool(stages)
        if not stages and entry is not None and entry.ended:
            stages = waterfall.measured(entry)
        if not stages and entry is None:
            message = f"request {request_id} is not among the latest ones of this gateway"
            return Response(errors.body(404, "not_found", message), 404, _HEADERS, "application/json")
        content = {"request": None if entry is None else row(entry), "stages": stages, "traced": has_spans}
        return JSONResponse(content, headers=_HEADERS)

    async def _fault(self, request: Request) -> Response:
        """Passes a fault on to the supervisor. A body of another type than JSON is refused, as pages of others send."""
        if not self._demo_faults or _tenant(request) is not None:
            message = "faults are for demonstrations: start the stack with --demo-faults, and use the key of --api-key"
            return Response(errors.body(403, "faults_not_allowed", message), 403, _HEADERS, "application/json")
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            message = "send application/json"
            return Response(errors.body(415, "unsupported_media_type", message), 415, _HEADERS, "application/json")
        try:
            body = msgspec.json.decode(await read_body(request.scope, request.receive, BODY_LIMIT), type=FaultBody)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"the body is no fault: {error}") from error
        if all(beat.instance != body.instance for beat in self._health.alive()):
            raise InvalidRequest(f"instance {body.instance} is not alive: reload the page")
        self._bus.publish(subjects.FAULTS, encode(Fault(body.instance, FaultKind(body.fault))))
        return JSONResponse({"instance": body.instance, "fault": body.fault}, 202, _HEADERS)


def _for_own_pages(answer: Handler) -> Handler:
    """Returns a handler that refuses requests of other web sites' pages, whatever `--allowed-origins` says."""

    async def guarded(request: Request) -> Response:
        if request.headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
            message = "pages of other sites may not use the console"
            return Response(errors.body(403, "origin_not_allowed", message), 403, _HEADERS, "application/json")
        return await answer(request)

    return guarded


def _tenant(request: Request) -> str | None:
    """Returns the tenant that sees its own requests alone; None: an operator, or anybody where there are no keys."""
    return request.scope.get("tenant") or None
