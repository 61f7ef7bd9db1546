"""The GPUs that kernels are compiled for: NVIDIA's by compute capability times ten, AMD's by LLVM's names."""

from collections.abc import Mapping
from functools import cache

PARTS = (80, 89, 90, 100, 120)
"""NVIDIA's GPUs that kernels are compiled for."""
AMD_PARTS = ("gfx942", "gfx950", "gfx1201")
"""AMD's GPUs that kernels are compiled for: MI300, MI350 and RX 9070. No kernel has run on one of them."""
AMD_STAND_IN = 80
"""The GPU in `PARTS` whose forms AMD's launch: small tiles, no dependent launch, no fp8."""
AMD_STAGES = 2
"""Pipeline stages on AMD's GPUs, at most: most of them have 64 KiB of shared memory."""
AMD_KEYS = 32
"""Keys of a tile of attention on AMD's GPUs with warps of 32 threads, at most: with more, registers spill."""
DEPENDENT_LAUNCH_SINCE = 90
"""First GPU that starts a kernel before the previous one has ended."""
WIDE = (90, 100)
"""GPUs whose products read operands from a large shared memory, which leaves registers for larger tiles. Tiles of all
other GPUs fit into 99 KiB."""


def is_wide(arch: int) -> bool:
    """Returns whether a GPU, which may be a variant of one in `PARTS`, takes large tiles."""
    return arch // 10 in {part // 10 for part in WIDE}


def has_dependent_launch(arch: int) -> bool:
    """Returns whether kernels are compiled for programmatic dependent launch on a GPU."""
    return arch >= DEPENDENT_LAUNCH_SINCE


@cache
def current() -> int:
    """Returns the GPU of this process; `AMD_STAND_IN` for AMD's; in the interpreter, one of `WIDE`."""
    import triton  # the CPU device does without it

    if triton.knobs.runtime.interpret:
        return WIDE[0]
    arch: int | str = triton.runtime.driver.active.get_current_target().arch
    return arch if isinstance(arch, int) else AMD_STAND_IN


@cache
def amd_part() -> str:
    """Returns LLVM's name of the GPU of this process if AMD made it; empty: another one, or the interpreter."""
    import triton

    if triton.knobs.runtime.interpret:
        return ""
    target = triton.runtime.driver.active.get_current_target()
    return str(target.arch) if target.backend == "hip" else ""


def known_options(launch: Mapping[str, int]) -> dict[str, int]:
    """Returns the sizes and options of a launch of attention or of a product as the GPU of this process takes them."""
    part = amd_part()
    return options_of_amd(launch, part) if part else dict(launch)


def options_of_amd(launch: Mapping[str, int], part: str) -> dict[str, int]:
    """Returns the sizes and options of a launch of attention or of a product on one of AMD's GPUs, by LLVM's name.

    Their compiler knows no limit of registers. Where a warp has 32 threads, as on gfx1201, there are twice as many
    warps: the compiler spreads a product over fewer registers then.

    >>> options_of_amd({"TILE": 64, "num_warps": 4, "num_stages": 5, "maxnreg": 224}, "gfx1201")
    {'TILE': 32, 'num_warps': 8, 'num_stages': 2}
    >>> options_of_amd({"TILE": 64, "num_warps": 4, "num_stages": 5}, "gfx942")
    {'TILE': 64, 'num_warps': 4, 'num_stages': 2}
    """
    options = {name: value for name, value in launch.items() if name != "maxnreg"}
    options["num_stages"] = min(options.get("num_stages", AMD_STAGES), AMD_STAGES)
    if part.startswith("gfx1"):
        options["num_warps"] *= 2
        if "TILE" in options:
            options["TILE"] = min(options["TILE"], AMD_KEYS)
    return options
