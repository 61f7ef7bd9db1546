"""The HTTP application: its routes."""

from collections.abc import Awaitable, Mapping, Sequence
from importlib.metadata import version

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pagewire.client.async_client import AsyncClient
from pagewire.services.gateway import openapi
from pagewire.services.gateway.answers.openai_shapes import Model, ModelList
from pagewire.services.gateway.console.assets import FOLDER
from pagewire.services.gateway.console.routes import Console
from pagewire.services.gateway.http import errors
from pagewire.services.gateway.http.authentication import Authentication, FindTenant
from pagewire.services.gateway.http.connection import ClientGone
from pagewire.services.gateway.metrics.metrics_page import MetricsPage
from pagewire.services.gateway.metrics.prometheus import CONTENT_TYPE
from pagewire.services.gateway.routes.adapters import Adapters
from pagewire.services.gateway.routes.endpoint import CLIENT_GONE, FAULT_MESSAGE
from pagewire.services.gateway.routes.endpoint import Endpoint as GeneratingEndpoint
from pagewire.services.gateway.routes.health import Health
from pagewire.services.gateway.routes.ollama_models import REFUSED, OllamaModels
from pagewire.services.gateway.routes.tokenization import Tokenization
from pagewire.shared.errors import Internal, InvalidRequest, ModelNotFound, PagewireError

Endpoints = Mapping[str, GeneratingEndpoint]
"""The endpoints that generate text, by path."""
EXPOSED_HEADERS = ("X-Request-Id", "Pagewire-Warning", "Retry-After")
"""Response headers that scripts of allowed web sites may read."""
POOLING = ("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")
"""Routes of vLLM for models that do not generate text."""


def build(
    client: AsyncClient,
    endpoints: Endpoints,
    health: Health,
    metrics: MetricsPage,
    find_tenant: FindTenant | None = None,
    allowed_origins: Sequence[str] = (),
    *,
    body_limit: int = 1 << 20,
    strict: bool = False,
    broker: str = "",
    console: Console | None = None,
) -> ASGIApp:
    """Returns the application, which must get paths in their normal spelling (`NormalPath`).

    Args:
        client: client of the pipeline.
        endpoints: endpoints that generate text, by path.
        health: health of the pipeline.
        metrics: page of metrics.
        find_tenant: returns the tenant of a key, which all paths but `PUBLIC_PATHS` need; None: no path needs one.
        allowed_origins: web sites whose scripts may send requests; `*`: all.
        body_limit: bytes of a body of the routes that generate no text.
        strict: whether the routes that generate no text refuse unknown fields.
        broker: URL of the broker, by which commands find the stack of an HTTP port.
        console: the page at `/`; None: there is none.
    """
    tokenization = Tokenization(client, body_limit, strict=strict)
    adapters = Adapters(client, body_limit, strict=strict)
    ollama = OllamaModels(client, body_limit, strict=strict)
    more_routes = [*(console.routes() if console else [Route("/", _no_page)]), *ollama.routes()]
    routes = _starlette(client, endpoints, health, metrics, tokenization, adapters, broker, more_routes)
    app: ASGIApp = Shortcut(endpoints, routes)
    if find_tenant is not None:
        app = Authentication(app, find_tenant, () if console is None else console.public_paths)
    if allowed_origins:
        app = CORSMiddleware(app, allowed_origins, ["*"], ["*"], expose_headers=EXPOSED_HEADERS)
    return app


def _starlette(
    client: AsyncClient,
    endpoints: Endpoints,
    health: Health,
    metrics: MetricsPage,
    tokenization: Tokenization,
    adapters: Adapters,
    broker: str,
    more_routes: Sequence[Route],
) -> ASGIApp:
    async def alive(_: Request) -> Response:
        return PlainTextResponse("alive")

    async def ready(request: Request) -> Response:
        model = request.query_params.get("model")
        if missing := health.missing() if model is None else health.missing_of(model):
            return PlainTextResponse(missing, 503)
        lacking = [f"{name}: {reason}" for name, reason in health.reasons().items() if reason and model is None]
        return PlainTextResponse("\n".join(["ready", *lacking]))

    async def ping(_: Request) -> Response:
        return Response(status_code=503 if health.missing() else 200)

    async def load(_: Request) -> Response:
        running = sum(endpoint.running for endpoint in endpoints.values())
        return JSONResponse({"server_load": running})

    async def own_version(_: Request) -> Response:
        return JSONResponse({"version": version("pagewire"), "nats": broker})

    async def description(_: Request) -> Response:
        return Response(msgspec.json.encode(openapi.document()), media_type="application/json")

    async def documentation(_: Request) -> Response:
        return HTMLResponse(openapi.page())

    async def models(request: Request) -> Response:
        served = [
            Model(info.name, info.root or info.name, info.max_model_len, info.parent or None)
            for info in await client.models()
        ]
        name = request.path_params.get("model")
        if name is None:
            return _json(ModelList(served))
        for model in served:
            if model.id == name:
                return _json(model)
        raise ModelNotFound(f"no model {name} is served: GET /v1/models lists the served models")

    async def metrics_page(_: Request) -> Response:
        return Response(await metrics.text(len(health.alive())), media_type=CONTENT_TYPE)

    async def pooling(request: Request) -> Response:
        raise InvalidRequest(f"{request.url.path}: embeddings, scores and other poolings are not supported here")

    return Starlette(
        routes=[
            Route("/livez", alive),
            Route("/readyz", ready),
            Route("/health", ready),
            Route("/ping", ping, methods=["GET", "POST"]),
            Route("/load", load),
            Route("/version", own_version),
            Route("/openapi.json", description),
            Route("/docs", documentation),
            Route("/metrics", metrics_page),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", models),
            Route("/tokenize", tokenization.tokenize, methods=["POST"]),
            Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
            Route("/detokenize", tokenization.detokenize, methods=["POST"]),
            Route("/v1/messages/count_tokens", tokenization.count_tokens, methods=["POST"]),
            *[Route(path, pooling, methods=["POST"]) for path in POOLING],
            *more_routes,
            *[Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()],
        ],
        exception_handlers={
            PagewireError: _on_pagewire_error,
            HTTPException: _on_http_error,
            ClientGone: _on_client_gone,
            Exception: _on_fault,
        },
    )


class Shortcut:
    """Calls generating endpoints without Starlette, whose middleware would handle every token three times."""

    def __init__(self, endpoints: Endpoints, others: ASGIApp) -> None:
        self._endpoints = endpoints
        self._others = others

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Calls the endpoint of a POST request to its path, and Starlette for all other requests."""
        endpoint = self._endpoints.get(scope["path"]) if scope["method"] == "POST" else None
        return (endpoint or self._others)(scope, receive, send)


async def _no_page(request: Request) -> Response:
    """Answers HEAD, by which Ollama's clients look for a server; there is no page."""
    if request.method == "HEAD":
        return Response()
    raise HTTPException(404)


async def _on_pagewire_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PagewireError)
    return errors.response(error, request.url.path)


async def _on_client_gone(_: Request, __: Exception) -> Response:
    """Ends a request whose client has disconnected before the end of its body: nobody reads the answer."""
    return Response(status_code=CLIENT_GONE)


async def _on_fault(request: Request, _: Exception) -> Response:
    """Answers a request that has met a fault, which Starlette raises again for the log."""
    return errors.response(Internal(FAULT_MESSAGE), request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answers a request whose path or method does not exist: names those that do."""
    assert isinstance(error, HTTPException)
    routes = {route.path: route.methods or set() for route in request.app.routes if isinstance(route, Route)}
    if error.status_code == 405:
        allowed = ", ".join(sorted(routes.get(request.url.path, set()) - {"HEAD"}))
        kind, hint = "method_not_allowed", f"send {allowed}" if allowed else "send another method"
    else:
        hidden = (*POOLING, *REFUSED, FOLDER)
        paths = [path for path in routes if "{" not in path and not path.startswith(hidden)]
        kind, hint = "not_found", f"use one of {', '.join(paths)}"
    message = f"{request.method} {request.url.path}: {error.detail}: {hint}"
    content = errors.body(error.status_code, kind, message, request.url.path)
    return Response(content, error.status_code, error.headers, "application/json")


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
