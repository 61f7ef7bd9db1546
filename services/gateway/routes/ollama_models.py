"""Ollama's routes about models: `/api/tags`, `/api/show`, `/api/ps`, `/api/version`, and those that are refused."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pagewire.client.async_client import AsyncClient
from pagewire.services.gateway.answers.ollama_shapes import now
from pagewire.services.gateway.http.connection import read_body
from pagewire.services.gateway.requests.sampling_fields import converted, read_fields
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.services.gateway.routes.ollama import served_name
from pagewire.shared.errors import InvalidRequest, ModelNotFound
from pagewire.shared.messages.client import ModelInfo

VERSION = "0.12.11"
"""The release of Ollama whose routes these are: clients compare it with the least one that they need."""
NEVER = "0001-01-01T00:00:00Z"
"""The time at which a model is unloaded that stays."""
_EMBEDDINGS = "embeddings are not supported here"
_SERVED = "the models are chosen where the server is started: pagewire serve MODEL"
REFUSED = {
    "/api/embed": _EMBEDDINGS,
    "/api/embeddings": _EMBEDDINGS,
    "/api/pull": _SERVED,
    "/api/push": _SERVED,
    "/api/create": _SERVED,
    "/api/copy": _SERVED,
    "/api/delete": _SERVED,
}
"""The routes of Ollama that nothing here can do, and why."""


class Details(msgspec.Struct):
    """Ollama's description of a model's file; what the gateway does not know is empty."""

    parent_model: str = ""
    """The model that an adapter changes."""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class TaggedModel(msgspec.Struct, kw_only=True):
    """A served model."""

    name: str
    model: str
    modified_at: str
    size: int = 0
    """Bytes of its file; 0: unknown."""
    digest: str
    """Hash of the served name and of the revision, which stands for the weights."""
    details: Details
    context_length: int
    expires_at: str = NEVER
    size_vram: int = 0


class TaggedModels(msgspec.Struct):
    """The response of `/api/tags` and `/api/ps`."""

    models: list[TaggedModel]


class ShowRequest(msgspec.Struct, kw_only=True):
    """The body of `/api/show`."""

    model: str = ""
    name: str = ""
    """An older name of `model`."""
    verbose: bool = False
    """Without effect."""


class ShowAnswer(msgspec.Struct, kw_only=True):
    """The response of `/api/show`."""

    details: Details
    model_info: dict[str, Any]
    """The name and the context length."""
    capabilities: list[str]
    modified_at: str
    license: str = ""
    modelfile: str = ""
    parameters: str = ""
    template: str = ""


class OllamaModels:
    """The handlers of the routes."""

    def __init__(self, client: AsyncClient, body_limit: int, *, strict: bool = False) -> None:
        """`strict`: whether unknown fields are refused."""
        self._client = client
        self._body_limit = body_limit
        self._strict = strict
        self._started = now()

    def routes(self) -> Sequence[Route]:
        """Returns the routes."""
        return [
            Route("/api/tags", self._tags),
            Route("/api/ps", self._tags),
            Route("/api/version", self._version),
            Route("/api/show", self._show, methods=["POST"]),
            *[Route(path, self._refuse, methods=["POST", "DELETE"]) for path in REFUSED],
        ]

    async def _tags(self, _: Request) -> Response:
        """Answers with the served models. All of them count as loaded: a request loads one that is not."""
        return _json(TaggedModels([self._tagged(info) for info in await self._client.models()]))

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def _show(self, request: Request) -> Response:
        unknown = UnknownFields(strict=self._strict)
        body = await read_body(request.scope, request.receive, self._body_limit)
        fields = read_fields(body, ShowRequest.__struct_fields__, "request", unknown)
        show = converted(fields, ShowRequest, "request")
        name = await served_name(self._client, show.model or show.name)
        for info in await self._client.models():
            if info.name == name:
                facts = {
                    "general.architecture": "pagewire",
                    "general.basename": info.root or info.name,
                    "pagewire.context_length": info.max_model_len,
                }
                return _json(
                    ShowAnswer(
                        details=Details(info.parent),
                        model_info=facts,
                        capabilities=["completion", "tools"],
                        modified_at=self._started,
                    )
                )
        raise ModelNotFound(f"no model {name} is served: GET /api/tags lists the served models")

    async def _refuse(self, request: Request) -> Response:
        raise InvalidRequest(f"{request.url.path}: {REFUSED[request.url.path]}")

    def _tagged(self, info: ModelInfo) -> TaggedModel:
        return TaggedModel(
            name=info.name,
            model=info.name,
            modified_at=self._started,
            digest=sha256(f"{info.name} {info.revision}".encode()).hexdigest(),
            details=Details(info.parent),
            context_length=info.max_model_len,
        )


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
