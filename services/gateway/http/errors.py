"""Errors in the shape of the route: OpenAI's, or Anthropic's under `/v1/messages`."""

import msgspec
from starlette.responses import Response

from pagewire.shared.errors import BusError, PagewireError, RequestError, Unavailable

MESSAGES = "/v1/messages"
"""Prefix of the paths whose errors have Anthropic's shape."""

_OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
"""OpenAI's types of errors by status, where the class of the status does not tell."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors by status, where the class of the status does not tell."""


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
    """Body of an error response, and data of an event, in Anthropic's shape."""

    error: AnthropicsDetail


def body(status: int, code: str, message: str, path: str = "") -> bytes:
    """Returns an error of a path as JSON, which is not an exception of the pipeline's."""
    return _body(status, Detail(message, _openai_type(status), None, code), path)


def body_of(error: PagewireError, path: str = "") -> tuple[int, bytes]:
    """Returns the status and JSON of an exception at a path."""
    error = _request_error(error)
    return error.code, _body(error.code, detail_of(error), path)


def detail_of(error: PagewireError) -> Detail:
    """Returns an exception in OpenAI's shape."""
    error = _request_error(error)
    return Detail(error.message, _openai_type(error.code), error.field, error.kind)


def response(error: PagewireError, path: str) -> Response:
    """Returns the response to a request for a path that has raised an exception."""
    status, content = body_of(error, path)
    return Response(content, status, _retry_headers(error, status), "application/json")


def _body(status: int, detail: Detail, path: str) -> bytes:
    if path.startswith(MESSAGES):
        kind = _ANTHROPIC_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
        return msgspec.json.encode(AnthropicsErrorBody(AnthropicsDetail(kind, detail.message)))
    return msgspec.json.encode(ErrorBody(detail))


def _openai_type(status: int) -> str:
    return _OPENAI_TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")


def _request_error(error: PagewireError) -> RequestError:
    if isinstance(error, BusError):
        return Unavailable("the broker does not answer")
    assert isinstance(error, RequestError)
    return error


def _retry_headers(error: PagewireError, status: int) -> dict[str, str]:
    """Returns the headers that say when to send a request again, or that it is of no use: OpenAI's clients read both.

    Without these headers the clients repeat a request after 409 and 500 too.
    """
    retry_after = getattr(error, "retry_after_ms", None)
    headers = {} if retry_after is None else {"Retry-After": str(max(1, round(retry_after / 1000)))}
    if status in {409, 500}:
        headers["x-should-retry"] = "false"
    return headers
