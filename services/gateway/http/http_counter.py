"""Counts HTTP requests by route and by the status of their answer."""

from collections import Counter
from collections.abc import Collection, Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewire.shared.metrics import table
from pagewire.shared.metrics.metric import Sample

STATUS = "status"
"""Key of the scope for the status of an answer: noted by the endpoint of a request for text, else by the counter."""
OTHER_ROUTE = "other"
"""Name of the route for all paths that do not exist."""

_MODELS = "/v1/models"


class HttpCounter:
    """Passes requests on and counts them. Requests for text note their own status: no token is handled here."""

    def __init__(self, app: ASGIApp, paths: Collection[str], others: Collection[str]) -> None:
        """Begins to count.

        Args:
            app: the application.
            paths: paths that generate text.
            others: all other paths that exist.
        """
        self._app = app
        self._paths = frozenset(paths)
        self._routes = frozenset({*paths, *others})
        self._counts: Counter[tuple[str, int]] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, and counts it when it has ended."""
        route = self._route_of(scope["path"])
        try:
            if route in self._paths and scope["method"] == "POST":
                await self._app(scope, receive, send)
            else:
                await self._app(scope, receive, _noting(scope, send))
        finally:
            self._counts[route, scope.get(STATUS, 500)] += 1

    def samples(self) -> Iterator[Sample]:
        """Yields how many requests of each route have ended with each status."""
        for (route, status), count in self._counts.items():
            yield table.HTTP_REQUESTS.sample(count, route, str(status))

    def _route_of(self, path: str) -> str:
        """Returns the route of a path. There are few of them, whatever clients ask for."""
        if path.startswith(f"{_MODELS}/"):
            return f"{_MODELS}/{{model}}"
        return path if path in self._routes else OTHER_ROUTE


def _noting(scope: Scope, send: Send) -> Send:
    async def note(message: Message) -> None:
        if message["type"] == "http.response.start":
            scope[STATUS] = message["status"]
        await send(message)

    return note
