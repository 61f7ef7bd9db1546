"""Every test of the CPU device holds for both ways of computing."""

from collections.abc import Callable
from functools import partial

import pytest

from pagewire.kernels.cpu import build
from tests.support.device import Driver

Drive = Callable[..., Driver]


@pytest.fixture(scope="module", params=["compiled", "pytorch"])
def drive(request: pytest.FixtureRequest) -> Drive:
    """`Driver` with compiled kernels, or in plain PyTorch as on a machine without a compiler."""
    if request.param == "compiled":
        build.load()
    return partial(Driver, compiled=request.param == "compiled")
