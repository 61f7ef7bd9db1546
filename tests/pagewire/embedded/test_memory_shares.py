"""The memory of several models: divided before anything is loaded."""

import subprocess
from pathlib import Path

import pytest

from pagewire.embedded import memory_shares
from pagewire.embedded.memory_shares import GPU_QUERY, free_gpu_memory, share_memory
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.memory_need import memory_need
from pagewire.shared.models.model_folder import BUNDLED
from pagewire.shared.settings.config import Settings

pytestmark = pytest.mark.anyio

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_shares, "free_memory", lambda: 4 * GIB)


def model(name: str, **settings: object) -> Settings:
    return Settings(model=str(BUNDLED), served_model_name=name, **{"device": "cpu", **settings})  # type: ignore[arg-type]


async def test_a_single_model_has_no_memory_bound() -> None:
    (alone,) = await share_memory([model("a")])
    assert alone.model_memory is None


async def test_models_get_their_needs_and_equal_parts_of_the_rest() -> None:
    short, long = await share_memory([model("a", max_model_len=64), model("b")])
    assert short.model_memory is not None
    assert long.model_memory is not None
    more = memory_need(model("b"), BUNDLED) - memory_need(model("a", max_model_len=64), BUNDLED)
    assert long.model_memory - short.model_memory == more
    assert 4 * GIB - 2 <= short.model_memory + long.model_memory <= 4 * GIB


async def test_a_configured_memory_bound_stays() -> None:
    bounded, other = await share_memory([model("a", model_memory=GIB), model("b")])
    assert (bounded.model_memory, other.model_memory) == (GIB, 3 * GIB)


async def test_memory_promised_to_running_models_is_not_free() -> None:
    (added,) = await share_memory([model("a")], promised=2 * GIB, always=True)
    assert added.model_memory == 2 * GIB
    with pytest.raises(ConfigurationError, match="do not fit"):
        await share_memory([model("a")], promised=4 * GIB, always=True)


def test_the_free_memory_of_gpus_is_that_of_the_fullest(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess(GPU_QUERY, 0, "1000, 2000\n1500, 2000\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert free_gpu_memory(0.9) == (1000 << 20) - int((2000 << 20) * (1 - 0.9))


def test_only_visible_gpus_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def answer(command: tuple[str, ...], **_: object) -> "subprocess.CompletedProcess[str]":
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, "1000, 2000\n", "")

    monkeypatch.setattr(subprocess, "run", answer)
    for visible in ("", "0,GPU-1f"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        free_gpu_memory(0.9)
    assert asked == [GPU_QUERY, (*GPU_QUERY, "--id", "0,GPU-1f")]


def test_a_missing_nvidia_smi_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="nvidia-smi"):
        free_gpu_memory(0.9)
