"""Encodes and decodes the requests that clients send over the bus; those that cannot be are `InvalidRequest`."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from pagewire.shared import subjects
from pagewire.shared.errors import InvalidRequest, invalid_field
from pagewire.shared.messages.open import Encoding

T = TypeVar("T")

MAX_DEPTH = 64
"""Maximum levels of a value that may have any form."""
MAX_VALUES = 100_000
"""Maximum values in a value that may have any form, at all levels together."""
_NAME = re.compile(r"\w{1,64}")
"""The first name in a path. A client may have sent a longer one, which no error repeats."""


class RequestHead(msgspec.Struct, frozen=True):
    """The fields of a request that its admission and its error frame depend on."""

    request_id: str | None = None
    stream: bool = False
    priority: int = 0
    timeout_ms: int = 60_000


def encoding_of(headers: Mapping[str, str]) -> Encoding:
    """Returns MessagePack if the header Content-Type, in any case, names it, else JSON.

    >>> encoding_of({"content-type": "application/msgpack"}).name
    'MSGPACK'
    """
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
        raise InvalidRequest(f"the request, read as {name}, is not valid: {error}", field=field_of(error)) from error


def field_of(error: Exception) -> str | None:
    """Returns the field of a request that msgspec refuses, from the path or the quoted name in msgspec's message.

    A sampling parameter is a field, too.

    >>> field_of(msgspec.ValidationError("Expected `int`, got `str` - at `$.sampling.n`"))
    'n'
    >>> field_of(msgspec.ValidationError("Object missing required field `prompt`"))
    'prompt'
    """
    text = str(error)
    for before in ("`$.sampling.", "`$.", "field `"):
        if before in text:
            name = _NAME.match(text.rpartition(before)[2])
            return name[0] if name else None
    return None


def encode_request(body: dict[str, Any], encoder: msgspec.msgpack.Encoder) -> bytes:
    """Returns a request in MessagePack.

    Raises:
        InvalidRequest: a field has an integer of more than 64 bits or is nested too deeply; the message names it.
    """
    try:
        return encoder.encode(body)
    except (OverflowError, RecursionError) as error:
        raise unencodable(body, encoder) from error


def unencodable(body: dict[str, Any], encoder: msgspec.msgpack.Encoder) -> InvalidRequest:
    """Returns the error for the field that cannot be encoded; a sampling parameter is a field, too."""
    sampling = msgspec.to_builtins(body.get("sampling", {}))
    for name, value in (body | sampling | {"sampling": None}).items():
        try:
            encoder.encode(value)
        except OverflowError:
            return invalid_field(name, "has an integer of more than 64 bits: give a smaller one")
        except RecursionError:
            return invalid_field(name, "is nested too deeply")
    return InvalidRequest("the request is nested too deeply")


def check_free_form(field: str, value: object, place: str = "") -> None:
    """Checks a value of any form: a deep or large one costs many times its bytes wherever it is read.

    Args:
        field: name of the field that has the value.
        value: any value of JSON.
        place: where the value is in the field, such as `[].tool_calls`, for the message.

    Raises:
        InvalidRequest: the value is nested more than `MAX_DEPTH` times, has more than `MAX_VALUES` values, or has an
            integer that no message can hold.
    """
    level, count = [value], 0
    for _ in range(MAX_DEPTH):
        count += len(level)
        if count > MAX_VALUES:
            raise InvalidRequest(f"{field}{place} has more than {MAX_VALUES} values: send fewer", field=field)
        if any(isinstance(each, int) and not -(2**63) <= each < 2**64 for each in level):
            raise InvalidRequest(f"{field}{place} has an integer of more than 64 bits: give a smaller one", field=field)
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return
    raise InvalidRequest(f"{field}{place} is nested more than {MAX_DEPTH} times: nest it less", field=field)


def decode_head(data: bytes, encoding: Encoding) -> RequestHead:
    """Returns the head of a request that is refused, with defaults for what cannot be read."""
    try:
        head = decode_request(data, RequestHead, encoding)
    except InvalidRequest:
        return RequestHead()
    valid_id = head.request_id is not None and subjects.is_token(head.request_id)
    return head if valid_id else msgspec.structs.replace(head, request_id=None)
