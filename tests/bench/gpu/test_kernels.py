"""All implementations compute the same attention; under the interpreter no time means anything."""

from typing import Any

import pytest
import torch

from pagewire.bench._gpu import kernels as module
from pagewire.bench._gpu.kernels import KernelRun, kernels, table
from pagewire.bench._gpu.plan import Cell
from pagewire.services.executor.devices.sim.roofline import shape_of
from tests.bench.gpu.cases import MACHINE, MODEL

NAMES = ["pagewire", "PyTorch SDPA", "FlexAttention"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is not there")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_every_implementation_is_timed_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECKED", 7)
    models: dict[str, Any] = {"tiny": MODEL}
    runs = list(kernels(MACHINE, models, [Cell(2, 48)], [32], repeats=2))
    assert [run.name for run in runs] == 2 * NAMES
    assert [(run.kind, run.rows, run.context) for run in runs[::3]] == [("decode", 2, 48), ("prefill", 1, 32)]
    for run in runs:
        assert run.error < 1e-5
        assert len(run.us) == 2
        assert run.share > 0


@pytest.mark.parametrize("rows", [1, 2])
def test_the_blocks_of_a_problem_lie_as_kernels_read_them(rows: int) -> None:
    shape = shape_of({**MODEL, "num_key_value_heads": 2, "num_attention_heads": 4})
    assert all(cache.is_contiguous() for cache in module.problem(shape, rows, 48, 1, MACHINE).caches)


def test_the_table_has_median_time_share_and_error() -> None:
    run = KernelRun("m", "decode", 8, 4096, "pagewire", [30.0, 10.0, 20.0], 1.5e-3, 0.85)
    assert table([run])[-1] == "| m | decode | 8 | 4096 | pagewire | 20.0 | 85.0% | 1.5e-03 |"
