"""Reads the requests that clients send over the bus: bytes in, a typed request or `InvalidRequest` out."""

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from pagewire.shared import subjects
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.open import Encoding

T = TypeVar("T")


class RequestHead(msgspec.Struct, frozen=True):
    """The fields of a request that its error frame depends on."""

    request_id: str | None = None
    stream: bool = False


def encoding_of(headers: Mapping[str, str]) -> Encoding:
    """Returns MessagePack if the header Content-Type, in any case, says so, else JSON."""
    for name, value in headers.items():
        if name.lower() == "content-type":
            kind = value.partition(";")[0].strip().lower()
            return Encoding.MSGPACK if kind == "application/msgpack" else Encoding.JSON
    return Encoding.JSON


def decode_request(data: bytes, kind: type[T], encoding: Encoding) -> T:
    """Returns the request in `data`.

    Raises:
        InvalidRequest: the bytes are malformed, or a field is unknown or of the wrong type; the message names it.
    """
    try:
        if encoding == Encoding.MSGPACK:
            return msgspec.msgpack.decode(data, type=kind)
        return msgspec.json.decode(data, type=kind)
    except RecursionError as error:
        raise InvalidRequest("the request is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        name = "MessagePack" if encoding == Encoding.MSGPACK else "JSON"
        raise InvalidRequest(f"the request, read as {name}, is not valid: {error}") from error


def decode_head(data: bytes, encoding: Encoding) -> RequestHead:
    """Returns the head of a request that is refused, with defaults for what cannot be read."""
    try:
        head = decode_request(data, RequestHead, encoding)
    except InvalidRequest:
        return RequestHead()
    valid_id = head.request_id is not None and subjects.is_token(head.request_id)
    return head if valid_id else RequestHead(None, head.stream)
