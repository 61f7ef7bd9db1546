"""Tests of models hold for both ways of computing layers."""

from collections.abc import Callable
from functools import partial

import pytest

from tests.support.device import Driver

Drive = Callable[..., Driver]


@pytest.fixture(scope="module", params=["compiled", "pytorch"])
def drive(request: pytest.FixtureRequest) -> Drive:
    """`Driver` with the compiled kernels, or with layers and attention in PyTorch, from which a GPU's are built."""
    return partial(Driver, compiled=request.param == "compiled")
