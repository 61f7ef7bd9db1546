"""Replaces GPU code that a Hopper GPU never loads by zeros, in shared libraries: python keep_hopper_code.py FILE ...

A fat binary has a container for each source file, with the machine code of several GPUs and perhaps PTX. The driver
loads the machine code of its own GPU, and compiles PTX only where there is none. The code of sm_90 and sm_90a is moved
to the beginning of its container. A container without such code gets the smallest code of an older GPU in the library,
so that it stays valid; in vLLM 0.26.0 these belong to kernels for other GPUs, and to twelve kernels of quantized
weights. The host's code and all offsets stay as they are.
"""

import struct
import sys
from pathlib import Path
from typing import NamedTuple

ARCH = 90
"""Compute capability of Hopper, times ten."""
MACHINE_CODE = 2
"""Kind of an entry that is not PTX."""
CONTAINER = 0xBA55ED50
"""First number of a container."""
SECTION = b".nv_fatbin\0"


class Entry(NamedTuple):
    """The code of one GPU in a container."""

    kind: int
    arch: int
    data: bytes


class Container(NamedTuple):
    """The code of one source file."""

    header: int
    """Offset of the container's header."""
    begin: int
    """Offset of the first entry."""
    end: int
    entries: list[Entry]


def keep_hopper_code(path: Path) -> str:
    """Changes a library in place; returns how many bytes of code are left and how many are zeros now, in words."""
    data = bytearray(path.read_bytes())
    containers = _containers(data)
    older = [
        entry.data
        for container in containers
        for entry in container.entries
        if entry.kind == MACHINE_CODE and entry.arch < ARCH
    ]
    kept = zeros = 0
    for header, begin, end, entries in containers:
        hopper = [entry.data for entry in entries if entry.kind == MACHINE_CODE and entry.arch == ARCH]
        smallest = min([*older, *(entry.data for entry in entries)], key=len)
        code = b"".join(hopper or [smallest])
        data[begin:end] = code + bytes(end - begin - len(code))
        struct.pack_into("<Q", data, header + 8, len(code))
        kept, zeros = kept + len(code), zeros + end - begin - len(code)
    path.write_bytes(data)
    return f"{path.name}: {kept / 1e6:.1f} MB of GPU code kept, {zeros / 1e6:.1f} MB replaced by zeros"


def _containers(data: bytearray) -> list[Container]:
    """Returns the containers of an ELF file's section of GPU code."""
    (sections,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, sections + number * size) for number in range(count)]
    texts = headers[names][4]
    (section,) = [header for header in headers if data[texts + header[0] :].startswith(SECTION)]
    at, end = section[4], section[4] + section[5]
    containers = []
    while at < end:
        if struct.unpack_from("<I", data, at)[0] != CONTAINER:  # padding
            at += 8
            continue
        head, length = struct.unpack_from("<HQ", data, at + 6)
        begin, after = at + head, at + head + length
        containers.append(Container(at, begin, after, _entries(data, begin, after)))
        at = after
    return containers


def _entries(data: bytearray, begin: int, end: int) -> list[Entry]:
    entries = []
    while begin < end:
        kind, _, head, length = struct.unpack_from("<HHIQ", data, begin)
        (arch,) = struct.unpack_from("<I", data, begin + 28)
        entries.append(Entry(kind, arch, bytes(data[begin : begin + head + length])))
        begin += head + length
    return entries


if __name__ == "__main__":
    for file in sys.argv[1:]:
        print(keep_hopper_code(Path(file)))
