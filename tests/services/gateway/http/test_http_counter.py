"""The numbers of HTTP requests by route and status."""

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pagewire.services.gateway.http.authentication import Authentication, find_tenant
from pagewire.services.gateway.http.http_counter import STATUS, HttpCounter

pytestmark = pytest.mark.anyio

TEXT = "/v1/completions"


async def ask(app: ASGIApp, method: str, path: str) -> None:
    async def send(_: object) -> None:
        """Drops the answer."""

    await app({"type": "http", "method": method, "path": path, "headers": []}, None, send)  # type: ignore[arg-type]


def counts(counter: HttpCounter) -> dict[tuple[str, ...], float]:
    return {sample.labels: sample.value for sample in counter.samples()}


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers requests for text with 200, notes their status itself, and has a fault at /load."""
    if scope["path"] == "/load":
        raise RuntimeError
    if scope["path"].startswith(TEXT):
        scope[STATUS] = 200
    await PlainTextResponse("", 404 if scope["path"] == "/secret/7" else 200)(scope, receive, send)


async def test_each_request_is_counted_once_for_its_route_and_status() -> None:
    counter = HttpCounter(application, [TEXT], ["/health", "/load", "/v1/models"])
    paths = [TEXT, TEXT, "/health", "/secret/7", "/secret/7", "/v1/models", "/v1/models/a/b"]
    for path in paths:
        await ask(counter, "POST" if path.startswith(TEXT) else "GET", path)
    with pytest.raises(RuntimeError):
        await ask(counter, "GET", "/load")
    assert counts(counter) == {
        (TEXT, "200"): 2,
        ("/health", "200"): 1,
        ("other", "404"): 2,
        ("/v1/models", "200"): 1,
        ("/v1/models/{model}", "200"): 1,
        ("/load", "500"): 1,
    }


async def test_a_request_for_text_without_a_key_is_counted_too() -> None:
    find = find_tenant("secret", None)
    assert find is not None
    counter = HttpCounter(Authentication(application, find), [TEXT], [])
    await ask(counter, "POST", TEXT)
    assert counts(counter) == {(TEXT, "401"): 1}
