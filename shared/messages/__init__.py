"""What crosses each edge: one file per edge, one doc line per field. Token ids travel as packed u32."""

from pagewire.shared.messages.codec import UNREADABLE, WIRE_VERSION, Decoder, Wire, encode, pack, unpack

__all__ = ["UNREADABLE", "WIRE_VERSION", "Decoder", "Wire", "encode", "pack", "unpack"]
