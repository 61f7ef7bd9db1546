"""The kernels as they are built for this machine."""

import pytest

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.kernels import CpuKernels


@pytest.fixture(scope="session")
def kernels() -> CpuKernels:
    """With one thread."""
    return CpuKernels(build.load(), 1)


@pytest.fixture(scope="session")
def many_threads() -> CpuKernels:
    """With more threads than this machine may have cores."""
    return CpuKernels(build.load(), 3)
