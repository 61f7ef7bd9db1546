"""The errors that users can get. `docs/protocol.md` lists the codes of those that end a request."""

from dataclasses import dataclass
from typing import ClassVar


class PagewireError(Exception):
    """Base class of all errors of Pagewire. The message tells the user what to do."""


class ConfigurationError(PagewireError):
    """A setting, a flag, a file or a model folder is invalid. Commands exit with code 2.

    The message is one line, whatever it quotes.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(line.strip() for line in message.splitlines()))


class WireVersionError(PagewireError):
    """A peer uses another version of the internal messages."""

    def __init__(self, theirs: int, ours: int) -> None:
        super().__init__(f"a peer uses wire version {theirs}, this service {ours}: run one release everywhere")
        self.theirs = theirs


class BusError(PagewireError):
    """The bus could not carry a message."""


class NoResponders(BusError):
    """Nobody subscribes to the subject of a request."""


class RequestTimeout(BusError):
    """A request got no reply before its deadline."""


class MessageTooLarge(BusError):
    """Headers and payload together exceed the server's limit."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"a message of {size} bytes exceeds the server's limit of {limit}")
        self.size = size
        self.limit = limit


class BusUnavailable(BusError):
    """There is no connection, or its outbound buffer is full."""


class ConnectionLost(BusUnavailable):
    """There is no connection, or it was lost before the reply: whether the request arrived is unknown."""


class StorageRefused(BusUnavailable):
    """The store takes nothing now: its disk or one of its limits is full, or the broker's JetStream is gone.

    Attributes:
        reason: the broker's own words.
    """

    def __init__(self, subject: str, reason: str) -> None:
        super().__init__(f"JetStream did not store {subject}: {reason}")
        self.reason = reason


class NotPermitted(BusError):
    """The broker forbids this user to publish or subscribe to a subject."""


class DeviceLost(PagewireError):
    """An executor's device can compute no more, whatever the sequences are: a process that is a part of it is lost.

    The message is the reason, and the process of the executor ends: another one opens the device again.
    """


@dataclass(frozen=True, slots=True)
class ContextLengths:
    """The lengths that do not fit, in tokens."""

    prompt: int
    """Tokens of the longest prompt, at least."""
    max_tokens: int
    """Tokens that the request asks for; 0: the prompt alone is too long."""
    context: int
    """Context length of the model."""


class RequestError(PagewireError):
    """Base class of the errors that end a request with an error frame.

    Attributes:
        code: number in the frame, and the status over HTTP.
        kind: name in the frame.
        retryable: whether the same request may succeed later.
        retry_after_ms: when to retry, in milliseconds from now; None: unknown.
        field: name of the invalid field of the request; None: no single field is to blame.
        lengths: the lengths of a request that exceeds the context; None: it is not too long.
    """

    code: ClassVar[int] = 500
    kind: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        retry_after_ms: int | None = None,
        *,
        field: str | None = None,
        lengths: ContextLengths | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms
        self.field = field
        self.lengths = lengths


class InvalidRequest(RequestError):
    """The request is malformed or asks for something that does not exist."""

    code, kind = 400, "invalid_request"


class ModelNotFound(RequestError):
    """No model of that name is served."""

    code, kind = 404, "model_not_found"


class DeadlineExceeded(RequestError):
    """`timeout_ms` has passed."""

    code, kind, retryable = 408, "deadline_exceeded", True


class DuplicateRequest(RequestError):
    """Another request has the same id and a different body."""

    code, kind = 409, "duplicate_request"


class PayloadTooLarge(RequestError):
    """The request or its result does not fit into a message."""

    code, kind = 413, "payload_too_large"


class ContextLength(RequestError):
    """The prompt and `max_tokens` together exceed the model's context length."""

    code, kind = 422, "context_length"


class Overloaded(RequestError):
    """A queue is full."""

    code, kind, retryable = 429, "overloaded", True


class Cancelled(RequestError):
    """The request was cancelled before its result was complete."""

    code, kind = 499, "cancelled"


class Internal(RequestError):
    """Pagewire has failed. The details are in the log and never in the message."""


class Unavailable(RequestError):
    """A service that the request needs is not running."""

    code, kind, retryable = 503, "unavailable", True


def invalid_field(field: str, reason: str) -> InvalidRequest:
    """Returns the error of a field that is invalid; the message begins with its name.

    >>> str(invalid_field("n", "must be at least 1, not 0"))
    'n must be at least 1, not 0'
    """
    return InvalidRequest(f"{field} {reason}", field=field)


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
