"""Programmatic dependent launch: a kernel starts before the previous one has ended, and waits for it itself.

The launch then takes no time between the two. GPUs of compute capability 9.0 or higher have it. Source: CUDA C++
Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

import ctypes
from functools import cache

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.kernels.gpu_arch import current, has_dependent_launch
from pagewire.kernels.triton.jit import jit

DRIVER = 12030
"""CUDA version of the oldest driver whose graphs can have such launches, as the driver states it."""


@jit
def wait_for_previous(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Waits until all earlier kernels have ended and their writes are visible. Then the next one may start.

    Every program must begin with it, even one that has nothing to do. Before it, earlier kernels may still write what
    this one reads, and read what this one writes. And the next kernel waits for this one only, so this one must not end
    before the earlier ones.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@cache
def launch_options() -> dict[str, bool]:
    """Returns what the launch of a kernel that begins with `wait_for_previous` needs on the current GPU."""
    if triton.knobs.runtime.interpret or not has_dependent_launch(current()):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True} if driver_version() >= DRIVER else {"PDL": False}


def driver_version() -> int:
    """Returns the CUDA version of the driver, such as 12080 for 12.8; `DRIVER` where there is none."""
    version = ctypes.c_int(DRIVER)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:  # kernels are compiled for a GPU that is not here
        return DRIVER
    return version.value
