"""The GPUs that kernels are compiled for, by compute capability times ten."""

from functools import cache

SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Maximum shared memory of a program, in bytes."""
PARTS = tuple(SHARED_MEMORY)
"""All GPUs that kernels are compiled for."""
FP8_SINCE = 89
"""First GPU with instructions to convert to and from fp8."""
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


def parts_with(element: str) -> tuple[int, ...]:
    """Returns those of `PARTS` with instructions to convert to and from an element type, by Triton's name."""
    return tuple(part for part in PARTS if element != "fp8e4nv" or part >= FP8_SINCE)


@cache
def current() -> int:
    """Returns the GPU of this process; in the interpreter, one of `WIDE`."""
    import triton  # the CPU device does without it

    if triton.knobs.runtime.interpret:
        return WIDE[0]
    arch: int = triton.runtime.driver.active.get_current_target().arch
    return arch
