"""Every error that a user can meet, typed, with the code that `interface.md` gives it."""

from typing import ClassVar


class PagewireError(Exception):
    """Base of the errors that Pagewire raises on purpose. The message tells the user what to do."""


class ConfigurationError(PagewireError):
    """A setting, a flag, a file or a model folder cannot be used. Commands end with exit code 2."""


class WireVersionError(PagewireError):
    """A peer speaks another version of the internal messages."""

    def __init__(self, theirs: int, ours: int) -> None:
        super().__init__(f"a peer speaks wire version {theirs}, this service speaks {ours}: run one release everywhere")
        self.theirs = theirs
        self.ours = ours


class BusError(PagewireError):
    """The bus could not carry a message."""


class NoResponders(BusError):
    """Nobody subscribes to the subject of a request."""


class RequestTimeout(BusError):
    """A request got no reply before its deadline."""


class MessageTooLarge(BusError):
    """Header and payload together exceed what the server accepts."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"a message of {size} bytes exceeds the server's limit of {limit}")
        self.size = size
        self.limit = limit


class BusUnavailable(BusError):
    """There is no connection, or its outbound buffer is full."""


class ConnectionLost(BusUnavailable):
    """There is no connection, or it broke while a reply was awaited: whether the request arrived is unknown."""


class NotPermitted(BusError):
    """The broker does not let this user publish or subscribe there."""


class RequestError(PagewireError):
    """Base of the errors that end one request with an error frame.

    Attributes:
        code: the number on the frame and, over HTTP, the status.
        kind: the name on the frame.
        retryable: whether the same request may succeed later.
    """

    code: ClassVar[int] = 500
    kind: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms


class InvalidRequest(RequestError):
    """The request is malformed, or asks for what does not exist."""

    code, kind = 400, "invalid_request"


class ModelNotFound(RequestError):
    """No model of that name is served here."""

    code, kind = 404, "model_not_found"


class DeadlineExceeded(RequestError):
    """`timeout_ms` has passed."""

    code, kind, retryable = 408, "deadline_exceeded", True


class DuplicateRequest(RequestError):
    """The same request id came with another body."""

    code, kind = 409, "duplicate_request"


class PayloadTooLarge(RequestError):
    """The request, or the result it asks for, does not fit into a message."""

    code, kind = 413, "payload_too_large"


class ContextLength(RequestError):
    """Prompt and `max_tokens` exceed the model's context."""

    code, kind = 422, "context_length"


class Overloaded(RequestError):
    """A queue is full."""

    code, kind, retryable = 429, "overloaded", True


class Cancelled(RequestError):
    """The request was cancelled before it had a result."""

    code, kind = 499, "cancelled"


class Internal(RequestError):
    """A fault of ours. The log has the details, the message never does."""


class Unavailable(RequestError):
    """A service that the request needs is not there."""

    code, kind, retryable = 503, "unavailable", True


REQUEST_ERRORS: dict[str, type[RequestError]] = {
    error.kind: error
    for error in (
        InvalidRequest,
        ModelNotFound,
        DeadlineExceeded,
        DuplicateRequest,
        PayloadTooLarge,
        ContextLength,
        Overloaded,
        Cancelled,
        Internal,
        Unavailable,
    )
}
