from functools import cache
from pathlib import Path

import pytest

from pagewire.services.detokenizer import service
from pagewire.shared.models.tokenizer_files import load_tokenizer
from tests.services.detokenizer.rig import write_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with gpt2's tokenizer."""
    return write_model(tmp_path_factory.mktemp("gpt2"))


_load = cache(load_tokenizer)


@pytest.fixture(autouse=True)
def _load_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a tokenizer takes longer than most tests."""
    monkeypatch.setattr(service, "load_tokenizer", _load)
