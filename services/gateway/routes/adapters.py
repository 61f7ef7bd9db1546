"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with vLLM's bodies."""

from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagewire.client.async_client import AsyncClient
from pagewire.services.gateway.http.connection import read_body
from pagewire.services.gateway.requests.sampling_fields import converted, read_fields
from pagewire.services.gateway.requests.unknown_fields import UnknownFields
from pagewire.shared.messages.adapters import LoadAdapterRequest, UnloadAdapterRequest

T = TypeVar("T", bound=msgspec.Struct)


class LoadAdapterBody(LoadAdapterRequest):
    """The body of `/v1/load_lora_adapter`."""

    base_model_name: str = ""
    """Model that the adapter changes; may be left out where only one is served."""


class UnloadAdapterBody(UnloadAdapterRequest):
    """The body of `/v1/unload_lora_adapter`."""

    base_model_name: str = ""
    """Model that the adapter changes; may be left out."""


class AdapterAnswer(msgspec.Struct):
    """An adapter that was loaded or removed."""

    message: str
    """vLLM's answer."""
    digest: str
    """Hash of the adapter's content."""


class Adapters:
    """The handlers of both routes."""

    def __init__(self, client: AsyncClient, body_limit: int, *, strict: bool = False) -> None:
        """`strict`: whether unknown fields are refused."""
        self._client = client
        self._body_limit = body_limit
        self._strict = strict

    async def load(self, request: Request) -> Response:
        """Loads an adapter for everybody."""
        body, unknown = await self._read(request, LoadAdapterBody)
        name, path, model = body.lora_name, body.lora_path, body.base_model_name
        digest = await self._client.load_adapter(name, path, model, replace=body.load_inplace)
        return _json(AdapterAnswer(f"Success: LoRA adapter '{name}' added successfully.", digest), unknown)

    async def unload(self, request: Request) -> Response:
        """Removes an adapter."""
        body, unknown = await self._read(request, UnloadAdapterBody)
        digest = await self._client.unload_adapter(body.lora_name, body.base_model_name)
        return _json(AdapterAnswer(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", digest), unknown)

    async def _read(self, request: Request, kind: type[T]) -> tuple[T, UnknownFields]:
        unknown = UnknownFields(strict=self._strict)
        known, name = kind.__struct_fields__, f"{request.url.path[1:]} request"
        body = await read_body(request.scope, request.receive, self._body_limit)
        return converted(read_fields(body, known, name, unknown), kind, name), unknown


def _json(answer: AdapterAnswer, unknown: UnknownFields) -> Response:
    headers = {name.decode(): value.decode() for name, value in unknown.headers()}
    return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")
