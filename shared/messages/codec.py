"""How structs become bytes inside the pipeline: one version byte, then MessagePack."""

import sys
from array import array
from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec

from pagewire.shared.errors import WireVersionError

WIRE_VERSION = 3
"""Raised whenever a peer built from the previous version could misread a message."""

_PREFIX = bytes([WIRE_VERSION])
_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")

if sys.byteorder != "little":
    raise ImportError("packed columns are little-endian; this machine is not")


class Wire(msgspec.Struct, array_like=True, tag=True, frozen=True, gc=False):
    """Base of every message between services: positional, tagged with the class name, immutable."""


def encode(message: Wire) -> bytes:
    """The bytes of `message`, led by the wire version."""
    return _PREFIX + _encoder.encode(message)


class Decoder(Generic[T]):
    """Decodes one message type, or a union of them.

    Raises:
        WireVersionError: the peer speaks another version.
        msgspec.DecodeError: the bytes are not such a message.
    """

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)

    def decode(self, data: bytes | memoryview) -> T:
        """The message in `data`."""
        view = memoryview(data)
        if not len(view):
            raise msgspec.DecodeError("the message is empty")
        if view[0] != WIRE_VERSION:
            raise WireVersionError(int(view[0]), WIRE_VERSION)
        return self._decoder.decode(view[1:])


def pack(values: Iterable[int]) -> bytes:
    """Integers in [0, 2**32) as packed little-endian u32."""
    return array("I", values).tobytes()


def unpack(data: bytes) -> list[int]:
    """The integers that `pack` packed."""
    return memoryview(data).cast("I").tolist()
