"""Encodes the frames to clients and their headers, for the services that answer clients."""

import re
from collections.abc import Callable

import msgspec

from pagewire.shared.errors import RequestError
from pagewire.shared.messages.adapters import AdapterReply
from pagewire.shared.messages.client import CancelReply, DeltaBatch, ErrorFrame, Frame, ModelList
from pagewire.shared.messages.open import Encoding
from pagewire.shared.messages.tokenize import DetokenizeReply, TokenizeReply

Reply = Frame | DeltaBatch | TokenizeReply | DetokenizeReply | ModelList | CancelReply | AdapterReply
"""Every message to a client, except for the empty message that closes a stream."""

_MESSAGE_LENGTH = 1000
"""Maximum characters of the message in an error frame."""
_HEADER_LENGTH = 200
"""Maximum characters of the message in a header."""
_UNPRINTABLE = re.compile(r"[^ -~]")
_json = msgspec.json.Encoder()
_msgpack = msgspec.msgpack.Encoder()


def encoder(encoding: int) -> Callable[[Reply], bytes]:
    """Returns the function that encodes frames in an `Encoding`."""
    return (_msgpack if encoding == Encoding.MSGPACK else _json).encode


def encode_frame(frame: Reply, encoding: int) -> bytes:
    """Encodes one frame in an `Encoding`."""
    return encoder(encoding)(frame)


def error_frame(error: RequestError, request_id: str, tokens_emitted: int = 0) -> ErrorFrame:
    """Returns the frame that ends a request with `error`."""
    return ErrorFrame(
        code=error.code,
        error=error.kind,
        message=error.message[:_MESSAGE_LENGTH],  # the message may quote the client's input
        retryable=error.retryable,
        request_id=request_id,
        tokens_emitted=tokens_emitted,
        retry_after_ms=error.retry_after_ms,
        field=error.field,
        lengths=error.lengths,
    )


def error_headers(error: RequestError) -> dict[str, str]:
    """Returns the headers of an error frame. The message is reduced to a short line of ASCII."""
    line = _UNPRINTABLE.sub("?", " ".join(error.message.split()))
    return {"Nats-Service-Error": line[:_HEADER_LENGTH], "Nats-Service-Error-Code": str(error.code)}
