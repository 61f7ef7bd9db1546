"""Errors in the shape of the route: OpenAI's, Anthropic's under `/v1/messages`, or Ollama's under `/api/`."""

import msgspec
from starlette.responses import Response

from pagewire.shared.errors import (
    BusError,
    ContextLengths,
    MessageTooLarge,
    PagewireError,
    PayloadTooLarge,
    RequestError,
    Unavailable,
)

MESSAGES = "/v1/messages"
"""Prefix of the paths whose errors have Anthropic's shape."""
OLLAMA = "/api/"
"""Prefix of the paths whose errors have Ollama's shape."""

CONTEXT_LENGTH = "context_length_exceeded"
"""OpenAI's code of a request that is too long for the model."""
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


class OllamasErrorBody(msgspec.Struct):
    """Body of an error response, and last line of a failed stream, in Ollama's shape."""

    error: str


def body(status: int, code: str, message: str, path: str = "") -> bytes:
    """Returns an error of a path as JSON, which is not an exception of the pipeline's."""
    return _body(status, Detail(message, _openai_type(status), None, code), path)


def body_of(error: PagewireError, path: str = "") -> tuple[int, bytes]:
    """Returns the status and JSON of an exception at a path."""
    error = _request_error(error)
    status, detail = status_of(error), detail_of(error)
    if error.lengths is not None and path.startswith(MESSAGES):
        detail.message = _anthropics_sentence(error.lengths)
    return status, _body(status, detail, path)


def status_of(error: RequestError) -> int:
    """Returns the HTTP status: a request that exceeds the context is a bad request for every client of these APIs."""
    return 400 if error.lengths is not None else error.code


def detail_of(error: PagewireError) -> Detail:
    """Returns an exception in OpenAI's shape."""
    error = _request_error(error)
    if error.lengths is not None:
        return Detail(_openais_sentence(error.lengths), _openai_type(400), None, CONTEXT_LENGTH)
    return Detail(error.message, _openai_type(error.code), error.field, error.kind)


def response(error: PagewireError, path: str) -> Response:
    """Returns the response to a request for a path that has raised an exception."""
    status, content = body_of(error, path)
    return Response(content, status, _retry_headers(error, status), "application/json")


def _body(status: int, detail: Detail, path: str) -> bytes:
    if path.startswith(MESSAGES):
        kind = _ANTHROPIC_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
        return msgspec.json.encode(AnthropicsErrorBody(AnthropicsDetail(kind, detail.message)))
    if path.startswith(OLLAMA):
        return msgspec.json.encode(OllamasErrorBody(detail.message))
    return msgspec.json.encode(ErrorBody(detail))


def _openai_type(status: int) -> str:
    return _OPENAI_TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")


def _openais_sentence(lengths: ContextLengths) -> str:
    """Returns OpenAI's words for a request that is too long, by which clients know that they have to shorten it."""
    limit = f"This model's maximum context length is {lengths.context} tokens. However, "
    if not lengths.max_tokens:
        return limit + f"your messages resulted in {lengths.prompt} tokens. Please reduce the length of the messages."
    return limit + (
        f"you requested {lengths.prompt + lengths.max_tokens} tokens ({lengths.prompt} in the messages, "
        f"{lengths.max_tokens} in the completion). Please reduce the length of the messages or completion."
    )


def _anthropics_sentence(lengths: ContextLengths) -> str:
    """Returns Anthropic's words for a request that is too long: its clients read the numbers, too."""
    if not lengths.max_tokens:
        return f"prompt is too long: {lengths.prompt} tokens > {lengths.context} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {lengths.prompt} + {lengths.max_tokens} > "
        f"{lengths.context}, decrease input length or `max_tokens` and try again"
    )


def _request_error(error: PagewireError) -> RequestError:
    if isinstance(error, MessageTooLarge):
        return PayloadTooLarge(str(error))
    if isinstance(error, BusError):
        return Unavailable("the broker does not answer")
    assert isinstance(error, RequestError)
    return error


def _retry_headers(error: PagewireError, status: int) -> dict[str, str]:
    """Returns the headers that say when to send a request again, or that it is of no use: OpenAI's clients read both.

    Without these headers the clients repeat a request after 408, 409 and 500 too. One that ran out of its time would be
    computed again, under another id.
    """
    retry_after = getattr(error, "retry_after_ms", None)
    headers = {} if retry_after is None else {"Retry-After": str(max(1, round(retry_after / 1000)))}
    if status in {408, 409, 500}:
        headers["x-should-retry"] = "false"
    return headers
