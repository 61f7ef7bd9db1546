"""Reads the resources of a kernel from NVIDIA's machine code, an ELF file with instructions of 16 bytes, or AMD's."""

import re
import struct
from typing import NamedTuple

import numpy as np

STORE_LOCAL, LOAD_LOCAL = 0x387, 0x983
"""Low twelve bits of the instructions STL and LDL, which move spilled registers. `cuobjdump -sass` names them."""
REGISTER_COUNT = b"\x04\x2f\x08\x00"
"""Head of the attribute of `.nv.info` that has a symbol's number and its registers, 32 bits each."""


class MachineCode(NamedTuple):
    """The resources of one kernel."""

    registers: int
    """Registers per thread."""
    spills: int
    """Number of instructions that store or load spilled registers; with AMD's assembly the number of the registers."""


def machine_code(cubin: bytes) -> MachineCode:
    """Returns the resources of the only kernel of a cubin.

    Raises:
        ValueError: the file has no kernel, or several.
    """
    sections = _sections(cubin)
    kernels = [code for name, code in sections if name.startswith(b".text.")]
    counts = [code for name, code in sections if name == b".nv.info"]
    if len(kernels) != 1 or len(counts) != 1 or REGISTER_COUNT not in counts[0]:
        raise ValueError(f"the cubin has {len(kernels)} kernels: one is expected, with its number of registers")
    opcodes = np.frombuffer(kernels[0], np.uint16)[::8] & 0xFFF
    (registers,) = struct.unpack_from("<I", counts[0], counts[0].index(REGISTER_COUNT) + 8)
    return MachineCode(registers, int(np.isin(opcodes, (STORE_LOCAL, LOAD_LOCAL)).sum()))


def amd_resources(assembly: str) -> MachineCode:
    """Returns the vector registers and the spills of the only kernel of AMD's assembly, from its metadata.

    Raises:
        ValueError: the text has no kernel, or several.
    """
    counts = re.findall(r"^\s*\.vgpr_count:\s*(\d+)$", assembly, re.MULTILINE)
    spills = re.findall(r"^\s*\.vgpr_spill_count:\s*(\d+)$", assembly, re.MULTILINE)
    if len(counts) != 1 or len(spills) != 1:
        raise ValueError(f"the assembly has {len(counts)} kernels: one is expected, with its number of registers")
    return MachineCode(int(counts[0]), int(spills[0]))


def _sections(elf: bytes) -> list[tuple[bytes, bytes]]:
    """Returns names and contents of the sections of a 64-bit ELF file."""
    table, size, count, names = struct.unpack_from("<Q10xHHH", elf, 40)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + index * size) for index in range(count)]
    strings = headers[names][4]
    return [
        (elf[strings + name : elf.index(b"\0", strings + name)], elf[offset : offset + length])
        for name, _, _, _, offset, length in headers
    ]
