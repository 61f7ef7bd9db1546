"""GGUF files byte by byte, which may say anything."""

import struct


def header(tensors: int = 0, entries: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    """The start of a file with its counts of tensors and of metadata entries."""
    return struct.pack("<4sIQQ", b"GGUF", version, tensors, entries) + body


def text(value: str | bytes) -> bytes:
    """A string behind its length."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    """A metadata entry."""
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    """A tensor's entry. The shape is in ggml's order, columns first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
