"""Without a GPU the device runs under Triton's interpreter, which must be chosen before the kernels are imported."""

import pytest
import torch

import tests.kernels.conftest  # noqa: F401


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
