import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagewire.shared.process import device_choice
from pagewire.shared.process.device_choice import Choice, choose, resolve
from pagewire.shared.settings.config import Settings


@pytest.fixture(autouse=True)
def unknown() -> Iterator[None]:
    choose.cache_clear()
    yield
    choose.cache_clear()


def answer(monkeypatch: pytest.MonkeyPatch, code: int, output: str, errors: str = "") -> None:
    """Lets the machine have a driver, and the check of its GPU end in this way."""
    monkeypatch.setattr(device_choice, "DRIVER_FILES", (Path("/dev/null"),))
    done: subprocess.CompletedProcess[str] = subprocess.CompletedProcess([], code, output, errors)

    def run(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        return done

    monkeypatch.setattr(subprocess, "run", run)


def test_a_supported_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, 0, "NVIDIA H100, 80 GiB\n")
    assert choose() == Choice("cuda", "NVIDIA H100, 80 GiB")
    assert resolve(Settings(device="auto")).device == "cuda"


@pytest.mark.parametrize(
    ("output", "errors", "reason"),
    [
        ("PyTorch 2.9+cpu is built without CUDA\n", "", "PyTorch 2.9+cpu is built without CUDA"),
        ("", "Traceback\nImportError: no libcuda\n", "ImportError: no libcuda"),
        ("", "", "the check of the GPU has ended"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_left_out_with_the_reason(
    output: str, errors: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, 1, output, errors)
    assert choose() == Choice("cpu", reason)


def test_a_machine_without_a_driver_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, 0, "NVIDIA H100")
    monkeypatch.setattr(device_choice, "DRIVER_FILES", (Path("/nowhere"),))
    assert choose() == Choice("cpu", "this machine has no NVIDIA driver")


@pytest.mark.parametrize("device", ["cpu", "cuda", "sim:zero"])
def test_a_device_that_is_set_stays(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, 0, "NVIDIA H100")
    assert resolve(Settings(device=device)).device == device
