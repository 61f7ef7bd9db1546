"""Takes a gateway into rotation and out of it.

While it starts, requests for text wait for the other services. While it drains, its connections are closed after their
next answer, and requests may be refused.
"""

import asyncio
from collections.abc import Awaitable, Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewire.services.gateway.http import errors
from pagewire.services.gateway.http.http_counter import STATUS
from pagewire.shared.errors import Unavailable

RETRY_AFTER_MS = 1000
"""Milliseconds after which a refused client may ask again: another gateway has then taken the port."""


class Rotation:
    """Passes requests on to the application while the gateway is in rotation.

    Attributes:
        closes: whether the next answer of each connection is its last.
        refuses: whether requests for text are answered with 503.
    """

    def __init__(self, app: ASGIApp, paths: Collection[str]) -> None:
        """`paths`: paths whose requests can wait or be refused."""
        self.closes = False
        self.refuses = False
        self._app = app
        self._paths = paths
        self._begun = asyncio.Event()

    def begin(self) -> None:
        """Passes on the requests that have waited for the start."""
        self._begun.set()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Passes the request on at once or after the start, or answers 503."""
        if not self._begun.is_set() and scope["path"] in self._paths:
            return self._after_start(scope, receive, send)
        if not self.closes:
            return self._app(scope, receive, send)

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
            await send(message)

        if self.refuses and scope["path"] in self._paths:
            stopping = Unavailable("the server is stopping: send the request again later", RETRY_AFTER_MS)
            scope[STATUS] = stopping.code
            return errors.response(stopping, scope["path"])(scope, receive, send_last)
        return self._app(scope, receive, send_last)

    async def _after_start(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._begun.wait()
        await self(scope, receive, send)
