"""How structs become bytes inside the pipeline: one version byte, then MessagePack."""

import sys
from array import array
from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec
import structlog

from pagewire.shared.bus import Message
from pagewire.shared.errors import WireVersionError

WIRE_VERSION = 3
"""Raised whenever a peer built from the previous version could misread a message."""
UNREADABLE = (WireVersionError, msgspec.DecodeError)
"""What `Decoder.decode` raises."""

_PREFIX = bytes([WIRE_VERSION])
_encoder = msgspec.msgpack.Encoder()
_log = structlog.get_logger()
T = TypeVar("T")

if sys.byteorder != "little":
    raise ImportError("packed columns are little-endian; this machine is not")


class Wire(msgspec.Struct, array_like=True, tag=True, frozen=True, gc=False):
    """Base of every message between services: positional, tagged with the class name, immutable."""


def encode(message: Wire) -> bytes:
    """The bytes of `message`, led by the wire version."""
    return _PREFIX + _encoder.encode(message)


class Decoder(Generic[T]):
    """Decodes one message type, or a union of them."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)

    def decode(self, data: bytes | memoryview) -> T:
        """Returns the message in `data`.

        Raises:
            WireVersionError: the peer speaks another version.
            msgspec.DecodeError: the bytes are not such a message.
        """
        view = memoryview(data)
        if not len(view):
            raise msgspec.DecodeError("the message is empty")
        if view[0] != WIRE_VERSION:
            raise WireVersionError(int(view[0]), WIRE_VERSION)
        return self._decoder.decode(view[1:])

    def try_decode(self, data: bytes | memoryview) -> T | None:
        """Returns the message in `data`, or None if it is unreadable.

        For what is published over and over, such as heartbeats: a peer of another release counts as absent.
        """
        try:
            return self.decode(data)
        except UNREADABLE:
            return None

    def read(self, message: Message) -> T | None:
        """Returns what a bus message holds; logs `message_unreadable` and returns None if it is unreadable."""
        try:
            return self.decode(message.data)
        except UNREADABLE as error:
            _log.error("message_unreadable", subject=message.subject, reason=str(error))
            return None


def pack(values: Iterable[int]) -> bytes:
    """Integers in [0, 2**32) as packed little-endian u32."""
    return array("I", values).tobytes()


def unpack(data: bytes) -> list[int]:
    """The integers that `pack` packed."""
    return memoryview(data).cast("I").tolist()
