"""Encodes the messages between services: one version byte, then MessagePack."""

import sys
from array import array
from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec
import structlog

from pagewire.shared.bus import Message
from pagewire.shared.errors import WireVersionError
from pagewire.shared.wire_version import WIRE_VERSION

UNREADABLE = (WireVersionError, msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors that `Decoder.decode` raises."""

_PREFIX = bytes([WIRE_VERSION])
_encoder = msgspec.msgpack.Encoder()
_log = structlog.get_logger()
T = TypeVar("T")

if sys.byteorder != "little":
    raise ImportError("Pagewire needs a little-endian machine")


class Wire(msgspec.Struct, array_like=True, tag=True, frozen=True, gc=False):
    """Base class of the messages between services: encoded by position, tagged with the class name, immutable."""


def encode(message: Wire) -> bytes:
    """Returns the bytes of a message, the wire version first."""
    return _PREFIX + _encoder.encode(message)


class Decoder(Generic[T]):
    """Decodes one message type, or a union of them."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._other_versions: set[int] = set()
        """Wire versions of other peers that were logged."""

    def decode(self, data: bytes | memoryview) -> T:
        """Returns the message.

        Raises:
            WireVersionError: the sender uses another version.
            msgspec.DecodeError, UnicodeDecodeError, RecursionError: the bytes are not a message of this type.
        """
        view = memoryview(data)
        if not len(view):
            raise msgspec.DecodeError("the message is empty")
        if view[0] != WIRE_VERSION:
            raise WireVersionError(int(view[0]), WIRE_VERSION)
        return self._decoder.decode(view[1:])

    def try_decode(self, data: bytes | memoryview) -> T | None:
        """Returns the message, or None if it is unreadable: its sender then counts as absent."""
        try:
            return self.decode(data)
        except UNREADABLE:
            return None

    def read(self, message: Message) -> T | None:
        """Returns the message in a bus message; None if it is unreadable.

        Then `message_unreadable` is logged, or `other_wire_version` once for each version: its senders count as absent.
        """
        try:
            return self.decode(message.data)
        except WireVersionError as error:
            if error.theirs not in self._other_versions:
                self._other_versions.add(error.theirs)
                _log.warning("other_wire_version", subject=message.subject, reason=str(error))
            return None
        except UNREADABLE as error:
            _log.error("message_unreadable", subject=message.subject, reason=str(error))
            return None


def pack(values: Iterable[int]) -> bytes:
    """Packs integers in [0, 2**32) as little-endian u32.

    >>> pack([1, 258]).hex()
    '0100000002010000'
    """
    return array("I", values).tobytes()


def unpack(data: bytes) -> list[int]:
    """Returns the integers that `pack` has packed.

    >>> unpack(pack([1, 258]))
    [1, 258]
    """
    return memoryview(data).cast("I").tolist()
