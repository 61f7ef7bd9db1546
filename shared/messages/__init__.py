"""The messages between services and clients, one file per edge. Token ids are packed as u32."""

from pagewire.shared.messages.codec import UNREADABLE, WIRE_VERSION, Decoder, Wire, encode, pack, unpack

__all__ = ["UNREADABLE", "WIRE_VERSION", "Decoder", "Wire", "encode", "pack", "unpack"]
