"""The calls that docstrings show return what they show."""

import doctest
import importlib

import pytest

MODULES = [
    "pagewire.services.detokenizer.text.stop_strings",
    "pagewire.services.detokenizer.text.text_decoder",
    "pagewire.services.tokenizer.chat.format_recognition",
    "pagewire.services.tokenizer.dispatch.admission",
    "pagewire.services.tokenizer.dispatch.replica_router",
    "pagewire.services.tokenizer.validation.json_schemas",
    "pagewire.services.tokenizer.validation.sampling_checks",
    "pagewire.shared.messages.codec",
]


@pytest.mark.parametrize("name", MODULES)
def test_the_docstrings_of_a_module_show_what_its_calls_return(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
