"""Errors in the shape of the route: OpenAI's, or Anthropic's under `/v1/messages`."""

import msgspec
from starlette.responses import Response

from pagewire.shared.errors import BusError, PagewireError, RequestError, Unavailable

_KINDS = {401: "authentication_error", 429: "rate_limit_error"}
_ANTHROPICS_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
MESSAGES = "/v1/messages"
"""Prefix of the paths whose errors have Anthropic's shape."""


class Detail(msgspec.Struct):
    """The error itself."""

    message: str
    type: str
    """OpenAI's type of the error."""
    param: str | None
    """The invalid field of the request."""
    code: str | None
    """Kind of the error in `pagewire.shared.errors`."""


class ErrorBody(msgspec.Struct):
    """Body of an error response, and data of the event that ends a failed stream."""

    error: Detail


class AnthropicsDetail(msgspec.Struct):
    """The error itself."""

    type: str
    """Anthropic's type of the error."""
    message: str


class AnthropicsErrorBody(msgspec.Struct, tag="error"):
    """The same as `ErrorBody` in Anthropic's shape."""

    error: AnthropicsDetail


def body(status: int, code: str, message: str, path: str = "", field: str | None = None) -> bytes:
    """Returns an error of a path as JSON. `field`: the invalid one of the request, which OpenAI's shape has."""
    if path.startswith(MESSAGES):
        kind = _ANTHROPICS_KINDS.get(status) or ("invalid_request_error" if status < 500 else "api_error")
        return msgspec.json.encode(AnthropicsErrorBody(AnthropicsDetail(kind, message)))
    kind = _KINDS.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return msgspec.json.encode(ErrorBody(Detail(message, kind, field, code)))


def body_of(error: PagewireError, path: str = "") -> tuple[int, bytes]:
    """Returns the status and JSON of an exception at a path."""
    if isinstance(error, BusError):
        error = Unavailable("the broker does not answer")
    assert isinstance(error, RequestError)
    return error.code, body(error.code, error.kind, error.message, path, error.field)


def response(error: PagewireError, path: str) -> Response:
    """Returns the response to a request for a path that has raised an exception."""
    status, content = body_of(error, path)
    return Response(content, status, _retry_headers(error, status), "application/json")


def _retry_headers(error: PagewireError, status: int) -> dict[str, str]:
    """Returns the headers that say when to send a request again, or that it is of no use: OpenAI's clients read both.

    Without these headers the clients repeat a request after 409 and 500 too.
    """
    retry_after = getattr(error, "retry_after_ms", None)
    headers = {} if retry_after is None else {"Retry-After": str(max(1, round(retry_after / 1000)))}
    if status in {409, 500}:
        headers["x-should-retry"] = "false"
    return headers
