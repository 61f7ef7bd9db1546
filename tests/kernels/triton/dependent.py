"""Looks for what compiled kernels do before they wait for the previous kernel.

`python -m tests.kernels.triton.dependent layers.gated layers.rms_norm`: compiles every form of these modules that
sm_90 launches before the previous kernel has ended, for sm_80 and sm_90, and prints what was found, as JSON. A process
of its own, because tests of kernels run them in Triton's interpreter.
"""

import json
import re
import sys

from tests.kernels.triton.ahead.compile import compiled, configurations
from tests.kernels.triton.ahead.cubin import machine_code
from tests.kernels.triton.sass import instructions

WAIT = "ACQBULK"
"""The instruction for `griddepcontrol.wait`."""
_MEMORY = re.compile(r"(?:^|\s)(?:LDG|STG|LDGSTS|ATOMG?|RED|UBLKCP|UTMA\w*)\b")
"""Instructions that touch memory which other kernels touch."""
_CONTROL = re.compile(r"(?:^|\s)(?:BRA|EXIT|CALL|BRX|RET)\b")


def before_the_wait(code: list[str]) -> list[str] | None:
    """Returns the jumps and the accesses to memory before the wait of a kernel; None if it does not wait."""
    waits = [place for place, instruction in enumerate(code) if WAIT in instruction]
    if not waits:
        return None
    return [line for line in code[: waits[0]] if _MEMORY.search(line) or _CONTROL.search(line)]


def main(modules: list[str]) -> None:
    """Prints a list of findings per form."""
    results = []
    for module, plain in configurations():
        if module not in modules or not plain.on(90).options.get("launch_pdl"):
            continue
        for arch in {80, 90} & set(plain.parts):
            form = plain.on(arch)
            kernel = compiled(form, arch)
            waits = "griddepcontrol.wait" in kernel.asm["ptx"]
            code = [line for _, line in instructions(kernel.asm["cubin"])] if waits else []
            results.append(
                {
                    "form": f"{module}: {form.name}",
                    "arch": arch,
                    "launched": bool(kernel.metadata.launch_pdl),
                    "waits": waits,
                    "before": before_the_wait(code),
                    "spills": machine_code(kernel.asm["cubin"]).spills,
                }
            )
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
