"""The calls that docstrings show."""

import doctest
from importlib import import_module

import pytest

MODULES = [
    "pagewire.services.gateway.answers.sse",
    "pagewire.shared.chat.formats.pythonic",
    "pagewire.shared.chat.parser",
    "pagewire.shared.chat.reader",
    "pagewire.shared.chat.typed_value",
    "pagewire.shared.client_protocol.client_requests",
    "pagewire.shared.errors",
]


@pytest.mark.parametrize("module", MODULES)
def test_every_call_in_a_docstring_has_the_result_beside_it(module: str) -> None:
    results = doctest.testmod(import_module(module))
    assert results.attempted
    assert not results.failed
