"""What the machine code of the attention kernels must have, and what the simulator assumes of it."""

import pytest

from pagewire.kernels import paged_attention, split_attention
from pagewire.kernels.compile import compiled
from pagewire.services.executor.devices.roofline import PROMPT_TILES
from tests.kernels.sass import product_loops

pytestmark = pytest.mark.full


def code_of(module: object, arch: int) -> dict[str, object]:
    """The code of the form of Llama-3-8B."""
    forms = module.configurations()  # type: ignore[attr-defined]
    (form,) = [form for form in forms if form.name.split(",")[0] == "llama-3-8b" and arch in form.parts]
    found: dict[str, object] = compiled(form, arch).asm
    return found


@pytest.mark.parametrize("arch", [80, 90])
def test_inner_loops_use_the_tensor_cores_and_asynchronous_copies(arch: int) -> None:
    for module in (paged_attention, split_attention):
        ptx = str(code_of(module, arch)["ptx"])
        assert "cp.async.cg.shared.global" in ptx, "copies of 16 bytes"
        assert "div.full" not in ptx.split("mma", 1)[1].rsplit("mma", 1)[0], "a division in the loop"
        assert "ldmatrix" in ptx or "wgmma" in ptx
    assert ("wgmma" in str(code_of(paged_attention, arch)["ptx"])) == (arch == 90)


@pytest.mark.parametrize(("arch", "tile"), PROMPT_TILES.items())
def test_the_simulator_knows_what_a_tile_of_a_prompt_costs(arch: int, tile: object) -> None:
    cubin = code_of(paged_attention, arch)["cubin"]
    assert isinstance(cubin, bytes)
    unmasked, masked = product_loops(cubin)
    assert abs(len(unmasked) - tile.instructions) <= 0.05 * tile.instructions  # type: ignore[attr-defined]
    assert len(unmasked) < 0.9 * len(masked), "most tiles need no mask"
