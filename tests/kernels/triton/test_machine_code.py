"""The machine code of the attention kernels has what it must have, and what the simulator assumes."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagewire.services.executor.devices.sim.roofline import PROMPT_TILES, PromptTile

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[3]


@functools.cache
def code_of(arch: int) -> dict[str, Any]:
    """Returns the machine code that `tests.kernels.triton.sass` prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton.sass", str(arch)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    code: dict[str, Any] = json.loads(done.stdout)
    return code


@pytest.mark.parametrize("arch", [80, 90])
def test_inner_loops_use_the_tensor_cores_and_asynchronous_copies(arch: int) -> None:
    for kernel in code_of(arch).values():
        ptx: str = kernel["ptx"]
        assert "cp.async.cg.shared.global" in ptx, "copies of 16 bytes"
        assert "div.full" not in ptx.split("mma", 1)[1].rsplit("mma", 1)[0], "a division in the loop"
        assert "ldmatrix" in ptx or "wgmma" in ptx
    assert ("wgmma" in code_of(arch)["paged_attention"]["ptx"]) == (arch == 90)


@pytest.mark.parametrize(("arch", "tile"), PROMPT_TILES.items())
def test_the_simulator_knows_the_instructions_of_a_prompt_tile(arch: int, tile: PromptTile) -> None:
    unmasked, masked = code_of(arch)["paged_attention"]["loops"]
    assert abs(unmasked - tile.instructions) <= 0.05 * tile.instructions
    assert unmasked < 0.9 * masked, "most tiles need no mask"
