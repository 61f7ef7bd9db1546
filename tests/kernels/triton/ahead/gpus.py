"""The limits of the GPUs that kernels are compiled for: NVIDIA's by compute capability times ten, AMD's by name."""

from collections.abc import Mapping

from pagewire.kernels.gpu_arch import AMD_PARTS, AMD_STAND_IN, PARTS

Gpu = int | str
"""An entry of `PARTS` or of `AMD_PARTS`."""
GPUS: Mapping[str, Gpu] = {f"sm_{part}": part for part in PARTS} | {part: part for part in AMD_PARTS}
"""All GPUs by the compilers' names."""
SHARED_MEMORY: dict[Gpu, int] = {
    80: 163 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
    "gfx942": 64 * 1024,
    "gfx950": 160 * 1024,
    "gfx1201": 64 * 1024,
}
"""Maximum shared memory of a program, in bytes."""
WARP = {"gfx942": 64, "gfx950": 64, "gfx1201": 32}
"""Threads of a warp of AMD's GPUs; NVIDIA's have 32."""
FP8_SINCE = 89
"""First GPU with instructions to convert to and from fp8."""


def parts_with(element: str) -> tuple[int, ...]:
    """Returns the GPUs with instructions to convert to and from an element type, by Triton's name."""
    return tuple(part for part in PARTS if element != "fp8e4nv" or part >= FP8_SINCE)


def part_of(gpu: Gpu) -> int:
    """Returns the entry of `PARTS` whose forms a GPU launches."""
    return gpu if isinstance(gpu, int) else AMD_STAND_IN


def name_of(gpu: Gpu) -> str:
    """Returns the compiler's name of a GPU: 90 is sm_90, and AMD's names are their own."""
    return f"sm_{gpu}" if isinstance(gpu, int) else gpu
