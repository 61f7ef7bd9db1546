"""Takes out, in place, the GPU code of a library that a Hopper GPU never loads, so that it compresses to nothing.

A fat binary holds, per source file, a container with the machine code of several GPUs and perhaps PTX. The driver picks
the machine code of its own GPU, and compiles PTX only where there is none. The machine code of sm_90 and sm_90a is kept
and moved to the beginning of its container; zeros follow. Where a source file has no such code, its container gets the
smallest code of an older GPU in the library, so that it stays valid. In vLLM 0.26.0 these are files for Blackwell or
Ada, and twelve that have only PTX for Hopper: Marlin's kernels and products of CUTLASS, all for quantized weights. The
host's code and all offsets stay as they are.
"""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ARCH, CODE = 90, 2
"""Hopper's number, and the kind of an entry with machine code."""
MAGIC = 0xBA55ED50
"""First word of a container."""


class Entry(NamedTuple):
    """The code of one GPU."""

    kind: int
    arch: int
    content: bytes


class Container(NamedTuple):
    """The code of one source file for all GPUs. Offsets are those in the library."""

    start: int
    first: int
    """Offset of the first entry."""
    end: int
    entries: list[Entry]


def main(path: str) -> None:
    """Rewrites a library, and prints how much of its GPU code is left."""
    data = bytearray(Path(path).read_bytes())
    containers = list(_containers(data))
    entries = [entry for container in containers for entry in container.entries]
    older = (entry.content for entry in entries if entry.kind == CODE and entry.arch < ARCH)
    filler = min(older, key=len, default=b"")
    kept = gone = 0
    for start, first, end, own in containers:
        content = b"".join(entry.content for entry in own if entry.kind == CODE and entry.arch == ARCH)
        content = content or min([filler or own[0].content, *(entry.content for entry in own)], key=len)
        data[first:end] = content + bytes(end - first - len(content))
        struct.pack_into("<Q", data, start + 8, len(content))
        kept, gone = kept + len(content), gone + end - first - len(content)
    Path(path).write_bytes(data)
    print(f"{Path(path).name}: {kept / 1e6:.1f} MB of GPU code kept, {gone / 1e6:.1f} MB taken out")


def _containers(data: bytearray) -> Iterator[Container]:
    """Yields the containers of the section .nv_fatbin of an ELF file."""
    (sections,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, sections + i * size) for i in range(count)]
    strings = headers[names][4]
    (header,) = [header for header in headers if data[strings + header[0] :].startswith(b".nv_fatbin\0")]
    at, end = header[4], header[4] + header[5]
    while at < end:
        if struct.unpack_from("<I", data, at)[0] != MAGIC:  # padding between containers
            at += 8
            continue
        head, length = struct.unpack_from("<HQ", data, at + 6)
        entries, here, after = [], at + head, at + head + length
        while here < after:
            kind, _, entry_head, payload = struct.unpack_from("<HHIQ", data, here)
            (arch,) = struct.unpack_from("<I", data, here + 28)
            entries.append(Entry(kind, arch, bytes(data[here : here + entry_head + payload])))
            here += entry_head + payload
        yield Container(at, at + head, after, entries)
        at = after


if __name__ == "__main__":
    for library in sys.argv[1:]:
        main(library)
