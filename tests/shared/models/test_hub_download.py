"""Downloads from the hub: which files, what a failure says, and that they can be stopped."""

import sys
import threading
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.fetch import FetchStopped
from pagewire.shared.models.hub_download import download, snapshot

HUB = """
import os, pathlib, time

def snapshot_download(model, **_):
    if model == "org/none":
        raise ValueError("cannot reach the hub\\nand more lines")
    if model == "org/large":
        pathlib.Path(os.environ["BEGUN"]).write_text(str(os.getpid()))
        time.sleep(600)
    return "/models/" + model
"""
"""The library, as far as a download needs it."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives the process of a download another library; returns the file that it writes when it is busy."""
    package = tmp_path / "library" / "huggingface_hub"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(HUB)
    (package / "errors.py").write_text("class HTTPError(Exception): ...\n")
    monkeypatch.setenv("PYTHONPATH", ":".join([str(package.parent), *filter(None, sys.path)]))
    monkeypatch.setenv("BEGUN", str(tmp_path / "begun"))
    return tmp_path / "begun"


@pytest.mark.parametrize("weights", [True, False])
def test_unused_files_are_not_downloaded(*, weights: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def note(_: str, **options: Any) -> str:
        asked.update(options)
        return "/m"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", note)
    assert snapshot("org/tiny", "", weights=weights).path == "/m"
    assert ("*.safetensors" in asked["allow_patterns"]) is weights
    assert "*.json" in asked["allow_patterns"]
    assert not any("bin" in pattern or "py" in pattern for pattern in asked["allow_patterns"])
    assert "consolidated*.safetensors" in asked["ignore_patterns"]
    assert asked["revision"] is None


@pytest.mark.parametrize(
    "failure",
    [
        LocalEntryNotFoundError("cannot reach the hub\nand more lines"),
        OSError("disk full"),
        ValueError("bad id"),
        ConnectionError(),
    ],
)
def test_the_reason_of_a_failure_is_one_line(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    failed = snapshot("org/tiny", "v2", weights=True)
    assert (failed.path, failed.reason) == ("", (str(failure).splitlines() or ["ConnectionError"])[0])


@pytest.mark.usefixtures("hub")
def test_a_model_is_downloaded_by_another_process() -> None:
    assert download("org/tiny", "", weights=True) == Path("/models/org/tiny")
    with pytest.raises(ConfigurationError, match=r"org/none.* of that id: cannot reach the hub$"):
        download("org/none", "", weights=True)


def test_a_download_can_be_stopped(hub: Path) -> None:
    stop = threading.Event()

    def stop_when_busy() -> None:
        while not hub.exists():
            stop.wait(0.05)
        stop.set()

    watcher = threading.Thread(target=stop_when_busy)
    watcher.start()
    with pytest.raises(FetchStopped, match="org/large was stopped"):
        download("org/large", "", weights=True, stop=stop)
    watcher.join()
