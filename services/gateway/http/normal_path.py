"""The one spelling of a path by which all checks and routes know it."""

from collections.abc import Awaitable

from starlette.types import ASGIApp, Receive, Scope, Send

MEANINGLESS = ("/", "\n")
"""Ends of a path without a meaning: clients send a slash, and Starlette takes a line break behind a route."""


class NormalPath:
    """Passes requests on with the normal spelling of their path, ahead of every check that depends on it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Passes the request on."""
        if (path := scope["path"]).endswith(MEANINGLESS):
            scope["path"] = path.rstrip("".join(MEANINGLESS)) or "/"
        return self._app(scope, receive, send)
