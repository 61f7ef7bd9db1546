"""A gateway over the memory bus, and ASGI requests to it."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from pagewire import AsyncClient
from pagewire.services.gateway import app
from pagewire.services.gateway.console.routes import Console
from pagewire.services.gateway.http.authentication import find_tenant
from pagewire.services.gateway.http.normal_path import NormalPath
from pagewire.services.gateway.metrics.metrics_page import MetricsPage
from pagewire.services.gateway.routes.endpoint import Endpoint
from pagewire.services.gateway.routes.health import Health
from pagewire.services.gateway.routes.request_log import RequestLog
from pagewire.services.gateway.service import APIS
from pagewire.shared import subjects
from pagewire.shared.bus.memory import MemoryBroker, MemoryBus
from pagewire.shared.messages import encode
from pagewire.shared.messages.heartbeat import Heartbeat
from tests.support.responder import Responder


@dataclass
class Answer:
    """A response."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def events(self) -> list[Any]:
        """Server-sent events; the last must be [DONE]."""
        lines = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [msgspec.json.decode(line) for line in lines[:-1]]


class Gateway:
    """The gateway's application over the memory bus."""

    def __init__(self, broker: MemoryBroker, responder: Responder, api_key: str = "", body_limit: int = 10_000) -> None:
        self.bus = MemoryBus(broker, inbox_prefix="_INBOX")
        self.responder = responder
        self.client = client = AsyncClient(bus=self.bus)
        self.changes = 0
        self.health = Health(self.bus, self._changed)
        self.requests = RequestLog()
        self.endpoints = {path: Endpoint(api, client, body_limit, self.requests) for path, api in APIS.items()}
        self.console = Console(self.bus, self.health, self.requests)
        self.completions = self.endpoints["/v1/completions"]
        self.app: ASGIApp = NormalPath(
            app.build(
                client,
                self.endpoints,
                self.health,
                MetricsPage(self.bus, vllm=True),
                find_tenant(api_key, None),
                console=self.console,
            )
        )

    def _changed(self) -> None:
        self.changes += 1

    def beat(self, service: str, *, ready: bool = True) -> None:
        beat = Heartbeat(service, f"{service}1", ready, 0, 0, 0, {})
        self.responder.bus.publish(f"{subjects.HEARTBEAT}.{service}.{service}1", encode(beat))

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.call("GET", path, b"", headers)

    async def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> Answer:
        return await self.call("POST", path, body if isinstance(body, bytes) else msgspec.json.encode(body), headers)

    async def call(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: dict[str, str],
        *,
        gone: asyncio.Event | None = None,
        slow: asyncio.Event | None = None,
        tenant: str = "",
        answer: Answer | None = None,
    ) -> Answer:
        """Sends a request, of a tenant if one is named. `answer`: takes the response, part by part.

        The client disconnects when `gone` is set, and reads only once `slow` is set.
        """
        answer = answer or Answer()
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            **({"tenant": tenant} if tenant else {}),
        }
        pending = [body[i : i + 4096] for i in range(0, len(body), 4096)] or [b""]

        async def receive() -> Message:
            if pending:
                part = pending.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(pending)}
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                if slow is not None:
                    await slow.wait()
                answer.chunks.append(message.get("body", b""))

        await self.app(scope, receive, send)
        return answer


async def start_gateway(api_key: str = "", body_limit: int = 10_000) -> Gateway:
    """Starts a gateway whose pipeline is a `Responder`."""
    broker = MemoryBroker()
    gateway = Gateway(broker, await Responder(MemoryBus(broker)).start(), api_key, body_limit)
    await gateway.health.listen()
    return gateway
