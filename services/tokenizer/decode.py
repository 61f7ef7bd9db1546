"""From the bytes of a client to a typed request."""

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from pagewire.shared import subjects
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.open import Encoding

T = TypeVar("T")


class Head(msgspec.Struct, frozen=True):
    """The part of a request that an error frame needs."""

    request_id: str | None = None
    stream: bool = False


def encoding_of(headers: Mapping[str, str]) -> Encoding:
    """MessagePack if the header Content-Type, in any case, says so, else JSON."""
    for name, value in headers.items():
        if name.lower() == "content-type":
            kind = value.partition(";")[0].strip().lower()
            return Encoding.MSGPACK if kind == "application/msgpack" else Encoding.JSON
    return Encoding.JSON


def decode(data: bytes, kind: type[T], encoding: Encoding) -> T:
    """The request in `data`.

    Raises:
        InvalidRequest: malformed, an unknown field, or a value of the wrong type; the message names the place.
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


def head_of(data: bytes, encoding: Encoding) -> Head:
    """The head of a request that was refused, as far as it can be read."""
    try:
        head = decode(data, Head, encoding)
    except InvalidRequest:
        return Head()
    named = head.request_id is not None and subjects.is_token(head.request_id)
    return head if named else Head(None, head.stream)
