"""Requests to a gateway that starts."""

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from pagewire.services.gateway.http.rotation import Rotation
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class Application:
    """Notes the paths that it is called with."""

    def __init__(self) -> None:
        self.called: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.called.append(scope["path"])


async def test_requests_for_text_wait_for_the_start_and_health_does_not() -> None:
    application = Application()
    rotation = Rotation(application, ("/v1/completions",))

    async def ask(path: str) -> None:
        await rotation({"type": "http", "path": path}, receive, send)

    async def receive() -> dict[str, object]:
        raise AssertionError

    async def send(message: object) -> None:
        raise AssertionError

    waiting = asyncio.create_task(ask("/v1/completions"))
    await ask("/health")
    assert application.called == ["/health"]
    assert not waiting.done()
    rotation.begin()
    await until(waiting.done)
    assert application.called == ["/health", "/v1/completions"]
