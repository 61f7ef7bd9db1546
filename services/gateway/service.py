"""The gateway: an OpenAI-compatible HTTP server that is an ordinary client of the pipeline."""

import asyncio

import structlog

from pagewire.client.async_client import AsyncClient
from pagewire.services.gateway import app, server
from pagewire.services.gateway.authentication import find_tenant
from pagewire.services.gateway.chat_completions import ChatCompletions
from pagewire.services.gateway.completions import Completions
from pagewire.services.gateway.endpoint import Api, Endpoint
from pagewire.services.gateway.health import Health
from pagewire.services.gateway.http_protocol import Connections
from pagewire.shared.api_keys import ApiKeys
from pagewire.shared.context import Context
from pagewire.shared.messages.heartbeat import Heartbeat

APIS: dict[str, Api] = {"/v1/completions": Completions(), "/v1/chat/completions": ChatCompletions()}
"""What generates text, by its path."""

_log = structlog.get_logger()


class Gateway:
    """The gateway service. It is ready while requests can be served."""

    def __init__(self, context: Context) -> None:
        settings = context.settings
        self._context = context
        self._keys = ApiKeys.load(settings.api_key_file) if settings.api_key_file else None
        self._tls = server.tls_context(settings)
        self._connections = Connections(server.limits_of(settings))
        self._listener = server.listen(settings.host, settings.port)
        self._port = int(self._listener.getsockname()[1])
        self._client = AsyncClient(bus=context.bus)
        limit = context.bus.max_payload
        self._endpoints = {path: Endpoint(api, self._client, body_limit=limit) for path, api in APIS.items()}
        self._health = Health(context.bus, on_change=context.announce)

    def heartbeat(self) -> Heartbeat:
        """Returns the port, and how many connections are open, were refused, and how many requests run and ended."""
        load = {
            "port": float(self._port),
            "connections": float(len(self._connections.open)),
            "refused": float(self._connections.refused),
            "running": float(sum(endpoint.running for endpoint in self._endpoints.values())),
            "requests": float(sum(endpoint.served for endpoint in self._endpoints.values())),
        }
        ready = not self._health.missing()
        return Heartbeat("gateway", self._context.instance, ready, term=0, plan=0, step=0, load=load)

    async def run(self) -> None:
        """Serves HTTP until cancelled."""
        await self._health.listen()
        find = find_tenant(self._context.settings.api_key, self._keys)
        application = app.build(self._client, self._endpoints, self._health, find)
        watching = asyncio.create_task(self._keys.watch()) if self._keys is not None else None
        try:
            with self._listener:
                _log.info("http_listening", port=self._port, tls=self._tls is not None)
                await server.Server(application, self._listener, self._connections, self._tls).run()
        finally:
            if watching is not None:
                watching.cancel()
