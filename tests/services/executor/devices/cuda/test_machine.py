"""A message names what is missing and what to install."""

import shutil
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pagewire.services.executor.devices.cuda.machine import capability, check_machine
from pagewire.shared.errors import ConfigurationError


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))


@pytest.mark.usefixtures("complete")
def test_a_complete_machine_is_described() -> None:
    assert check_machine() == "NVIDIA H100, 80 GiB, compute capability 9.0, CUDA 13.0"


@pytest.mark.usefixtures("complete")
@pytest.mark.parametrize(
    ("place", "name", "found", "said"),
    [
        (torch.version, "cuda", None, "built without CUDA"),
        (torch.cuda, "is_available", lambda: False, "driver 580 or newer"),
        (torch.cuda, "get_device_capability", lambda: (7, 5), "compute capability 7.5"),
        (shutil, "which", lambda _: None, "install gcc"),
        (sysconfig, "get_path", lambda _: "/nowhere", "Python.h"),
    ],
)
def test_a_missing_part_is_named(
    monkeypatch: pytest.MonkeyPatch, place: object, name: str, found: object, said: str
) -> None:
    monkeypatch.setattr(place, name, found)
    with pytest.raises(ConfigurationError, match=said):
        check_machine()


@pytest.mark.usefixtures("complete")
def test_amds_gpus_are_known_by_name_and_said_to_be_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(part: str) -> SimpleNamespace:
        return SimpleNamespace(total_memory=192 << 30, gcnArchName=f"{part}:sramecc+:xnack-")

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "AMD Instinct MI300X")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties("gfx942"))
    assert check_machine() == "AMD Instinct MI300X, 192 GiB, gfx942, ROCm 7.0: no kernel has run on such a GPU so far"
    assert capability() == (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties("gfx906"))
    with pytest.raises(ConfigurationError, match="gfx942, gfx950, gfx1201"):
        check_machine()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="AMD's driver"):
        check_machine()
