"""Counts instructions of the loops of compiled kernels, in the machine code that `cuobjdump` shows.

`python -m tests.kernels.triton.sass 90`: prints what the attention kernels of Llama-3-8B have for sm_90, as JSON. A
process of its own, because tests of kernels run them in Triton's interpreter, which compiles nothing.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton

from tests.kernels.triton.ahead.attention import decode_attention, paged_attention
from tests.kernels.triton.ahead.compile import compiled

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", re.MULTILINE)
_BACK = re.compile(r"\bBRA\S*\s.*?(0x[0-9a-f]+)")


def instructions(cubin: bytes) -> list[tuple[int, str]]:
    """The instructions of a kernel and their addresses, in the order of the code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", path]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [(int(place, 16), instruction) for place, instruction in _LINE.findall(text)]


def product_loops(cubin: bytes) -> list[list[str]]:
    """The instructions of each loop that has matrix products, in the order of the code."""
    code, loops = instructions(cubin), []
    for place, instruction in code:
        back = _BACK.search(instruction)
        if back is not None and int(back[1], 16) <= place:
            body = [inner for at, inner in code if int(back[1], 16) <= at <= place]
            if any("MMA" in inner for inner in body):
                loops.append(body)
    return loops


def main(arch: int) -> None:
    """Prints the PTX and the numbers of instructions in the loops of each kernel by its name."""
    listing = {}
    for module in (paged_attention, decode_attention):
        named = [form for form in module.configurations() if form.name.split(",")[0] == "llama-3-8b"]
        (form,) = [form for form in named if arch in form.parts]
        code = compiled(form, arch).asm
        loops = [len(loop) for loop in product_loops(code["cubin"])]
        listing[module.__name__.rpartition(".")[2]] = {"ptx": code["ptx"], "loops": loops}
    json.dump(listing, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]))
