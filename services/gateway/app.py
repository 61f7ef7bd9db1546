"""The HTTP application: its routes."""

from collections.abc import Awaitable, Mapping

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pagewire.client.async_client import AsyncClient
from pagewire.services.gateway import errors
from pagewire.services.gateway.authentication import Authentication, FindTenant
from pagewire.services.gateway.endpoint import Endpoint as GeneratingEndpoint
from pagewire.services.gateway.health import Health
from pagewire.services.gateway.metrics import MetricsPage
from pagewire.services.gateway.prometheus import CONTENT_TYPE
from pagewire.services.gateway.shapes import Model, ModelList
from pagewire.shared.errors import ModelNotFound, PagewireError

Endpoints = Mapping[str, GeneratingEndpoint]
"""The generating endpoints by path."""


def build(
    client: AsyncClient,
    endpoints: Endpoints,
    health: Health,
    metrics: MetricsPage,
    find_tenant: FindTenant | None = None,
) -> ASGIApp:
    """Returns the application. With `find_tenant`, all paths but those of `authentication.PUBLIC` need a key."""
    app = Shortcut(endpoints, _starlette(client, endpoints, health, metrics))
    return app if find_tenant is None else Authentication(app, find_tenant)


def _starlette(client: AsyncClient, endpoints: Endpoints, health: Health, metrics: MetricsPage) -> ASGIApp:
    async def alive(_: Request) -> Response:
        return PlainTextResponse("alive")

    async def ready(_: Request) -> Response:
        missing = health.missing()
        return PlainTextResponse(missing or "ready", 503 if missing else 200)

    async def models(request: Request) -> Response:
        served = [Model(info.name, info.name, info.max_model_len) for info in await client.models()]
        name = request.path_params.get("model")
        if name is None:
            return _json(ModelList(served))
        for model in served:
            if model.id == name:
                return _json(model)
        raise ModelNotFound(f"no model {name} is served: GET /v1/models lists the served models")

    async def figures(_: Request) -> Response:
        return Response(await metrics.text(health.instances), media_type=CONTENT_TYPE)

    return Starlette(
        routes=[
            Route("/livez", alive),
            Route("/readyz", ready),
            Route("/health", ready),
            Route("/metrics", figures),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", models),
            *[Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()],
        ],
        exception_handlers={PagewireError: _on_pagewire_error, HTTPException: _on_http_error},
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


async def _on_pagewire_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, PagewireError)
    return errors.response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answers a request whose path or method does not exist."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    content = errors.body(error.status_code, "not_found", message)
    return Response(content, error.status_code, error.headers, "application/json")


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
