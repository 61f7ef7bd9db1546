"""The kernels as they are built for this machine."""

import pytest
import torch

from kernels.cpu import build
from kernels.cpu.operators import Operators


@pytest.fixture(scope="session")
def operators() -> Operators:
    """With one thread."""
    torch.set_num_threads(1)
    return Operators(build.load())


@pytest.fixture(scope="session")
def many_threads() -> Operators:
    """With more threads than this machine may have cores."""
    torch.set_num_threads(3)
    made = Operators(build.load())
    torch.set_num_threads(1)
    return made
