"""Counts instructions of the loops of compiled kernels, in the machine code that `cuobjdump` shows."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", re.MULTILINE)
_BACK = re.compile(r"\bBRA\S*\s.*?(0x[0-9a-f]+)")


def product_loops(cubin: bytes) -> list[list[str]]:
    """The instructions of each loop that has matrix products, in the order of the code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", path]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    code = [(int(place, 16), instruction) for place, instruction in _LINE.findall(text)]
    loops = []
    for place, instruction in code:
        back = _BACK.search(instruction)
        if back is not None and int(back[1], 16) <= place:
            body = [inner for at, inner in code if int(back[1], 16) <= at <= place]
            if any("MMA" in inner for inner in body):
                loops.append(body)
    return loops
