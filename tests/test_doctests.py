"""The calls that docstrings show."""

import doctest
from importlib import import_module

import pytest

MODULES = [
    "pagewire.kernels.cpu.targets",
    "pagewire.services.executor.devices.edits",
    "pagewire.services.executor.devices.gathered_attention",
    "pagewire.services.executor.packed_columns",
    "pagewire.services.executor.replay_buffer",
    "pagewire.services.executor.sequence_key",
]


@pytest.mark.parametrize("module", MODULES)
def test_every_call_in_a_docstring_has_the_result_beside_it(module: str) -> None:
    results = doctest.testmod(import_module(module))
    assert results.attempted
    assert not results.failed
