"""Messages between rank 0 and another rank at the start, over a socket, as lines of JSON."""

import hashlib
import socket
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from pagewire.services.executor.devices.protocol import Capacity
from pagewire.shared.messages import WIRE_VERSION
from pagewire.shared.settings.config import Settings

T = TypeVar("T", bound=msgspec.Struct)


class Start(msgspec.Struct, frozen=True):
    """Tells a rank what to load."""

    settings: Settings
    folder: str
    """Folder of the model."""
    rank: int
    threads: int
    """Threads that load the part, and on a CPU those that compute at most."""
    memory: int
    """File descriptor of the memory that all ranks share."""
    store: int
    """File descriptor of the file through which ranks on GPUs find each other."""
    adapters: int
    """File descriptor of the connection over which the rank gets its parts of adapters."""


class Fingerprint(msgspec.Struct, frozen=True):
    """Values that must be equal on all ranks. A refusal names the field that differs."""

    version: str
    settings: str
    model_files: str

    def difference(self, other: "Fingerprint") -> str:
        """Returns the name of the first field that differs, empty if none does.

        >>> Fingerprint("1", "a", "b").difference(Fingerprint("1", "a", "c"))
        'model files'
        """
        fields = (name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name))
        return next(fields, "").replace("_", " ")


class Loaded(msgspec.Struct, frozen=True):
    """Says that a rank has loaded its part of the model, or why it refuses to."""

    fingerprint: Fingerprint | None = None
    refusal: str = ""


class Connect(msgspec.Struct, frozen=True):
    """Tells a rank on a GPU that all ranks have loaded their parts: they connect, and measure their memory."""


class Measured(msgspec.Struct, frozen=True):
    """Says how much memory a rank's GPU has for the KV pool."""

    room: int
    """Bytes that the pool may have where its size is not set."""
    limit: int
    """Bytes that it cannot exceed."""
    block_bytes: int
    """Bytes of a block over all layers of a group."""


class Sizes(msgspec.Struct, frozen=True):
    """Tells a rank the sizes of the device."""

    capacity: Capacity


class Ready(msgspec.Struct, frozen=True):
    """Says that a rank waits for calls, and counts heartbeats."""


class Connection:
    """One end of a connection between rank 0 and another rank, which is the socket `end`."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._rest = b""

    def fileno(self) -> int:
        """Returns the file descriptor, which is readable when the peer has ended."""
        return self.end.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message.

        Raises:
            OSError: the peer has ended.
        """
        self.end.sendall(msgspec.json.encode(message) + b"\n")

    def receive(self, kind: type[T], timeout: float | None = None) -> T:
        """Waits for a message, for `timeout` seconds at most.

        Raises:
            TimeoutError: none has come.
            EOFError: the peer has ended.
        """
        until = None if timeout is None else time.monotonic() + timeout
        try:
            while b"\n" not in self._rest:
                self.end.settimeout(None if until is None else max(0.001, until - time.monotonic()))
                data = self.end.recv(1 << 16)
                if not data:
                    raise EOFError
                self._rest += data
        finally:
            self.end.settimeout(None)  # it would be that of all that is sent later, too
        line, _, self._rest = self._rest.partition(b"\n")
        return msgspec.json.decode(line, type=kind)

    def close(self) -> None:
        """Closes this end."""
        self.end.close()


def fingerprint_of(settings: Settings, folder: Path) -> Fingerprint:
    """Returns the fingerprint of this process. It covers the names, sizes and modification times of the model's files,
    not their content."""
    files = hashlib.sha256()
    for file in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
        if file.is_file():
            status = file.stat()
            files.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    digest = hashlib.sha256(msgspec.json.encode(settings)).hexdigest()
    return Fingerprint(str(WIRE_VERSION), digest, files.hexdigest())
