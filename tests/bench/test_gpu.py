"""`pagewire bench gpu`: refused without a GPU, and what it writes of the parts that it runs."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagewire import cli
from pagewire.bench import gpu
from pagewire.bench._gpu.machine import measured, timed
from pagewire.bench._gpu.plan import Cell
from pagewire.bench._gpu.profile import Gap, ProfileRun, table
from pagewire.shared.errors import ConfigurationError
from tests.bench.gpu.cases import MACHINE, MODEL
from tests.support.host_runtime import HostRuntime


def given(*parts: str, output: Path | None = None) -> argparse.Namespace:
    settings = {"kv_cache_dtype": "auto", "attention_backend": "triton"}
    return argparse.Namespace(parts=parts, models=["tiny"], **settings, output=output)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "gpu", "decode"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "pagewire: bench gpu needs a GPU that PyTorch can use, and there is none\n"


def test_an_fp8_cache_is_refused_where_serving_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    with pytest.raises(ConfigurationError, match="kv-cache-dtype"):
        gpu.main(["decode", "--kv-cache-dtype", "fp8"])


def test_a_backend_of_attention_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigurationError, match="pip install flashinfer-python"):
        gpu.main(["decode", "--attention-backend", "flashinfer"])


@pytest.mark.parametrize("arguments", [["decodes"], ["decode", "--models", "gpt-5"]])
def test_unknown_parts_and_models_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(arguments)


def test_the_grid_has_the_documented_cells() -> None:
    assert gpu.ROWS == (1, 8, 32, 64, 128, 256)
    assert gpu.CONTEXTS == (512, 4096, 16384)
    assert set(gpu.MODELS) == {"llama-3-8b", "qwen3-0.6b", "qwen3-14b"}
    assert (min(gpu.PROMPTS), max(gpu.PROMPTS)) == (512, 8192)
    assert list(gpu.PARTS) == ["decode", "prefill", "kernels", "linear", "profile", "load"]


def test_rates_are_bytes_and_operations_over_the_median_time() -> None:
    machine = measured(HostRuntime(), torch.float32, room=7, copied=1 << 16, matrix=32)
    assert machine.room == 7
    assert machine.bandwidth > 0
    assert machine.rate > 0


def test_work_is_timed_after_one_that_does_not_count() -> None:
    calls: list[int] = []
    assert len(timed(HostRuntime(), lambda: calls.append(0), 3)) == 3
    assert len(calls) == 4


def test_tables_are_printed_and_raw_results_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("the interpreter is not there")
    monkeypatch.setattr(gpu, "SHAPES", {"tiny": MODEL})
    monkeypatch.setattr(gpu, "PROMPTS", (16,))
    monkeypatch.setattr(gpu, "PREFILL_REPEATS", 1)
    output = tmp_path / "gpu.json"
    assert gpu.report(MACHINE, given("prefill", output=output), ["prefill"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "### prefill" in lines
    assert lines[-1].startswith("| tiny | 16 |")
    written = json.loads(output.read_text())
    assert written["command"] == "pagewire bench gpu prefill"
    assert written["device"] == "cpu"
    assert written["copy_bytes_per_s"] == MACHINE.bandwidth
    assert {"torch", "triton", "transformers", "pagewire", "python"} <= written.keys()
    (run,) = written["parts"]["prefill"]
    assert len(run["device_ms"]) == 1


def test_a_part_that_fails_is_reported_and_the_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Iterator[ProfileRun]:
        raise RuntimeError("out of memory")

    run = ProfileRun("tiny", 64, 50, 0.9, [])
    parts = {"decode": gpu.Section(fail, table), "profile": gpu.Section(lambda *_: iter([run]), table)}
    monkeypatch.setattr(gpu, "PARTS", parts)
    output = tmp_path / "gpu.json"
    assert gpu.report(MACHINE, given("decode", "profile", output=output), []) == 1
    assert "failed: out of memory" in capsys.readouterr().out
    written = json.loads(output.read_text())
    assert written["failures"] == {"decode": "out of memory"}
    assert [run["model"] for run in written["parts"]["profile"]] == ["tiny"]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is not there")
def test_all_parts_that_need_no_gpu_run_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the profile fails, whose trace has no work of a GPU; the load has a test of its own."""
    monkeypatch.setattr(gpu, "SHAPES", {"tiny": MODEL})
    for name, cells in {"ROWS": (1, 2), "CONTEXTS": (96,), "PROMPTS": (16,), "KERNEL_CELLS": (Cell(2, 48),)}.items():
        monkeypatch.setattr(gpu, name, cells)
    monkeypatch.setattr(gpu, "DECODE_STEPS", 3)
    monkeypatch.setattr(gpu, "PROFILED", Cell(2, 96))
    output = tmp_path / "gpu.json"
    assert gpu.report(MACHINE, given("decode", "prefill", "kernels", "profile", output=output), []) == 1
    written = json.loads(output.read_text())
    assert list(written["parts"]) == ["decode", "prefill", "kernels"]
    assert list(written["failures"]) == ["profile"]


def test_a_host_sync_is_a_failure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    gap = Gap(20.0, 1, between=True, waited_for="cudaStreamSynchronize")
    run = ProfileRun("tiny", Cell(64, 4096).rows, 50, 0.9, [gap])
    monkeypatch.setattr(gpu, "PARTS", {"profile": gpu.Section(lambda *_: iter([run]), table)})
    assert gpu.report(MACHINE, given("profile"), ["profile"]) == 1
    assert "1 gaps between steps are host syncs" in capsys.readouterr().out
