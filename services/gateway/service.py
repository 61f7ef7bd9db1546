"""The gateway: an OpenAI-compatible HTTP server that is an ordinary client of the pipeline."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import structlog

from pagewire.client.async_client import AsyncClient
from pagewire.services.gateway import app, openapi
from pagewire.services.gateway.console.routes import Console
from pagewire.services.gateway.http import server
from pagewire.services.gateway.http.authentication import find_tenant
from pagewire.services.gateway.http.http_counter import HttpCounter
from pagewire.services.gateway.http.http_protocol import Connections
from pagewire.services.gateway.http.normal_path import NormalPath
from pagewire.services.gateway.http.origin import PageGuard, allowed_pages
from pagewire.services.gateway.http.rotation import Rotation
from pagewire.services.gateway.metrics.metrics_page import MetricsPage
from pagewire.services.gateway.routes.anthropic_messages import Messages
from pagewire.services.gateway.routes.chat_completions import ChatCompletions
from pagewire.services.gateway.routes.completions import Completions
from pagewire.services.gateway.routes.endpoint import Api, Endpoint
from pagewire.services.gateway.routes.health import Health
from pagewire.services.gateway.routes.ollama import OllamaChat, OllamaGenerate
from pagewire.services.gateway.routes.ollama_models import REFUSED
from pagewire.services.gateway.routes.request_log import RequestLog
from pagewire.services.gateway.routes.responses import Responses
from pagewire.shared.errors import BusError, Unavailable
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.metrics import table
from pagewire.shared.metrics.metric import Sample
from pagewire.shared.process import listener
from pagewire.shared.process.context import Context, Drain
from pagewire.shared.process.linux_process import awaited_models
from pagewire.shared.process.polling import poll
from pagewire.shared.security.api_keys import ApiKeys
from pagewire.shared.settings.config import names, nats_urls, without_logins

APIS: dict[str, Api] = {
    "/v1/completions": Completions(),
    "/v1/chat/completions": ChatCompletions(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
    "/api/chat": OllamaChat(),
    "/api/generate": OllamaGenerate(),
}
"""The routes that generate text, by path."""

START_TIMEOUT = 10.0
"""Seconds that a new gateway gives the other services, which may restart as well, before it refuses requests."""

_log = structlog.get_logger()


class Gateway:
    """The gateway service. It is ready while requests can be served."""

    def __init__(self, context: Context) -> None:
        settings = context.settings
        self._context = context
        self._keys = ApiKeys.load(settings.api_key_file) if settings.api_key_file else None
        self._tls = server.tls_context(settings)
        self._connections = Connections(server.limits_of(settings))
        self._listener = listener.inherited() or listener.listen(settings.host, settings.port)
        self._port = int(self._listener.getsockname()[1])
        self._client = AsyncClient(bus=context.bus)
        limit, requests = context.bus.max_payload, RequestLog()
        drafts = settings.per_request_spec_decode_metrics != "none"
        self._endpoints = {
            path: Endpoint(api, self._client, limit, requests, strict=settings.strict, metrics=drafts)
            for path, api in APIS.items()
        }
        self._health = Health(context.bus, context.announce, awaited_models())
        find = find_tenant(settings.api_key, self._keys)
        self._console = None
        if settings.console:
            faults = settings.demo_faults
            self._console = Console(context.bus, self._health, requests, settings.trace_dir, demo_faults=faults)
        origins = names(settings.allowed_origins)
        metrics = MetricsPage(context.bus, vllm=settings.metrics_compat == "vllm")
        application = app.build(
            self._client,
            self._endpoints,
            self._health,
            metrics,
            find,
            origins,
            body_limit=limit,
            strict=settings.strict,
            broker=without_logins(nats_urls(settings)),
            console=self._console,
        )
        pages = allowed_pages(settings)
        self._open_to_all = find is None and pages is None
        """Whether everybody who reaches the port may use it."""
        guarded = PageGuard(application, pages)
        self._rotation = Rotation(guarded, tuple(openapi.ROUTES))
        self._counter = HttpCounter(self._rotation, APIS, (*openapi.ROUTES, *openapi.GET_PATHS, *REFUSED, "/v1/models"))
        self._server = server.Server(
            NormalPath(self._counter), self._listener, self._connections, self._tls, self._detach
        )

    def heartbeat(self) -> Heartbeat:
        """Returns the port, and how many connections are open, were refused, and how many requests run and ended."""
        load = {
            "port": float(self._port),
            "connections": float(len(self._connections.open)),
            "refused": float(self._connections.refused),
            "running": float(self._running),
            "requests": float(self._served),
        }
        ready = not self._health.missing()
        return Heartbeat("gateway", self._context.instance, ready, term=0, plan=0, step=0, load=load)

    def metrics(self) -> Iterator[Sample]:
        """Yields the figures of HTTP."""
        yield table.CONNECTIONS.sample(len(self._connections.open))
        yield table.HTTP_LIMITED.sample(self._connections.refused)
        yield table.HTTP_RUNNING.sample(self._running)
        yield from self._counter.samples()

    async def drain(self) -> None:
        """Finishes the requests in progress and closes all connections.

        With a successor, which has the same listening socket, it takes requests until that one is ready. If the whole
        stack stops, it refuses new requests until it is ended.
        """
        follows = self._context.follows()
        if follows is Drain.SUCCESSOR:
            await poll(lambda: self._health.has_successor(self._context.instance, self._port))
        self._health.draining = "the server is stopping"
        self._rotation.closes = True
        match follows:
            case Drain.SUCCESSOR:
                await self._server.leave()
            case Drain.ALONE:
                await poll(lambda: not self._running)
            case Drain.STOP:
                self._rotation.refuses = True
                await asyncio.Event().wait()

    async def run(self) -> None:
        """Serves HTTP until cancelled."""
        await self._health.listen()
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self._begin())]
            if self._keys is not None:
                background.append(tasks.create_task(self._keys.watch()))
            if self._console is not None:
                background.append(tasks.create_task(self._console.run()))
            with self._listener:
                _log.info("http_listening", port=self._port, tls=self._tls is not None)
                if self._open_to_all:
                    _log.warning("open_to_all", host=self._context.settings.host, hint="set --api-key")
                await self._server.run()
            for task in background:
                task.cancel()

    def _detach(self) -> None:
        for endpoint in self._endpoints.values():
            endpoint.leave()

    async def _begin(self) -> None:
        """Lets requests in once the other services are ready, and their models known: requests for these can wait."""
        with suppress(TimeoutError, Unavailable, BusError):
            async with asyncio.timeout(START_TIMEOUT):
                await poll(lambda: not self._health.missing())
                await self._client.models()
        self._rotation.begin()

    @property
    def _served(self) -> int:
        return sum(endpoint.served for endpoint in self._endpoints.values())

    @property
    def _running(self) -> int:
        return sum(endpoint.running for endpoint in self._endpoints.values())
