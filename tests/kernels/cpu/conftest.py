"""The kernels as they are built for this machine."""

import pytest

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.operators import Operators


@pytest.fixture(scope="session")
def operators() -> Operators:
    """With one thread."""
    return Operators(build.load(), 1)


@pytest.fixture(scope="session")
def many_threads() -> Operators:
    """With more threads than this machine may have cores."""
    return Operators(build.load(), 3)
