"""Encodes the messages between services: one version byte, then MessagePack."""

import sys
from array import array
from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec

from pagewire.shared.errors import WireVersionError

WIRE_VERSION = 2
"""Incremented whenever a peer of the previous version could misread a message."""

_PREFIX = bytes([WIRE_VERSION])
_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")

if sys.byteorder != "little":
    raise ImportError("Pagewire needs a little-endian machine")


class Wire(msgspec.Struct, array_like=True, tag=True, frozen=True, gc=False):
    """Base class of the messages between services: encoded by position, tagged with the class name, immutable."""


def encode(message: Wire) -> bytes:
    """Encodes a message, preceded by the wire version."""
    return _PREFIX + _encoder.encode(message)


class Decoder(Generic[T]):
    """Decodes one message type, or a union of them."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)

    def decode(self, data: bytes | memoryview) -> T:
        """Decodes a message.

        Raises:
            WireVersionError: the sender uses another version.
            msgspec.DecodeError: the bytes are not a message of this type.
        """
        view = memoryview(data)
        if not len(view):
            raise msgspec.DecodeError("the message is empty")
        if view[0] != WIRE_VERSION:
            raise WireVersionError(int(view[0]), WIRE_VERSION)
        return self._decoder.decode(view[1:])


def pack(values: Iterable[int]) -> bytes:
    """Packs integers in [0, 2**32) as little-endian u32."""
    return array("I", values).tobytes()


def unpack(data: bytes) -> list[int]:
    """Returns the integers that `pack` has packed."""
    return memoryview(data).cast("I").tolist()
