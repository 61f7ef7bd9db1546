"""The messages between services and clients, one file per edge. Token ids are packed as u32."""

from pagewire.shared.messages.codec import UNREADABLE, Decoder, Wire, encode, pack, unpack
from pagewire.shared.wire_version import WIRE_VERSION

__all__ = ["UNREADABLE", "WIRE_VERSION", "Decoder", "Wire", "encode", "pack", "unpack"]
