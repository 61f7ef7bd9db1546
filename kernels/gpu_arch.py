"""The GPUs that kernels are compiled for, by compute capability times ten."""

from functools import cache

PARTS = (80, 89, 90, 100, 120)
"""All GPUs that kernels are compiled for."""
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
    """Returns the GPU of this process; in the interpreter, one of `WIDE`."""
    import triton  # the CPU device does without it

    if triton.knobs.runtime.interpret:
        return WIDE[0]
    arch: int = triton.runtime.driver.active.get_current_target().arch
    return arch
