"""How frames to clients become bytes and headers: used by whoever answers a client."""

import re
from collections.abc import Callable

import msgspec

from pagewire.shared.errors import RequestError
from pagewire.shared.messages.client import (
    CancelReply,
    DeltaBatch,
    DetokenizeReply,
    ErrorFrame,
    Frame,
    ModelList,
    TokenizeReply,
)
from pagewire.shared.messages.open import Encoding

Reply = Frame | DeltaBatch | TokenizeReply | DetokenizeReply | ModelList | CancelReply
"""Whatever a client may be sent, but for the empty message that closes a stream."""

_MESSAGE_LENGTH = 1000
_HEADER_LENGTH = 200
_UNPRINTABLE = re.compile(r"[^ -~]")
_json = msgspec.json.Encoder()
_msgpack = msgspec.msgpack.Encoder()


def encoder(encoding: int) -> Callable[[Reply], bytes]:
    """What makes the bytes of frames in the `Encoding` of a request."""
    return (_msgpack if encoding == Encoding.MSGPACK else _json).encode


def encode_frame(frame: Reply, encoding: int) -> bytes:
    """The bytes of a frame in the `Encoding` of its request."""
    return encoder(encoding)(frame)


def error_frame(error: RequestError, request_id: str, tokens_emitted: int = 0) -> ErrorFrame:
    """The frame that ends a request with `error`."""
    return ErrorFrame(
        code=error.code,
        error=error.kind,
        message=error.message[:_MESSAGE_LENGTH],  # it may quote what the client sent
        retryable=error.retryable,
        request_id=request_id,
        tokens_emitted=tokens_emitted,
        retry_after_ms=error.retry_after_ms,
    )


def error_headers(error: RequestError) -> dict[str, str]:
    """The headers of an error frame. A header is a short line of ASCII, so the message is cut to that."""
    line = _UNPRINTABLE.sub("?", " ".join(error.message.split()))
    return {"Nats-Service-Error": line[:_HEADER_LENGTH], "Nats-Service-Error-Code": str(error.code)}
