"""The limits of the GPUs that kernels are compiled for, by compute capability times ten."""

from pagewire.kernels.gpu_arch import PARTS

SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Maximum shared memory of a program, in bytes."""
FP8_SINCE = 89
"""First GPU with instructions to convert to and from fp8."""


def parts_with(element: str) -> tuple[int, ...]:
    """Returns the GPUs with instructions to convert to and from an element type, by Triton's name."""
    return tuple(part for part in PARTS if element != "fp8e4nv" or part >= FP8_SINCE)
