"""The calls that docstrings show."""

import doctest
from importlib import import_module

import pytest

MODULES = [
    "pagewire.services.scheduler.policy.beam_search.ranking",
    "pagewire.services.scheduler.policy.block_pool",
    "pagewire.services.scheduler.policy.budget",
    "pagewire.services.scheduler.policy.prefix_cache",
    "pagewire.services.scheduler.policy.service_rate",
    "pagewire.services.scheduler.policy.suspects",
    "pagewire.services.scheduler.policy.waiting_queue",
]


@pytest.mark.parametrize("module", MODULES)
def test_every_call_in_a_docstring_has_the_result_beside_it(module: str) -> None:
    results = doctest.testmod(import_module(module))
    assert results.attempted
    assert not results.failed
