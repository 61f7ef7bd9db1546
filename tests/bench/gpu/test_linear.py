"""Products in every format are timed; under the interpreter no time means anything."""

from typing import Any

import pytest
import torch

from pagewire.bench._gpu import linear as module
from pagewire.bench._gpu.linear import LinearRun, linear, table
from tests.bench.gpu.cases import MACHINE, MODEL


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is not there")
def test_every_format_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROUP", 32)
    monkeypatch.setattr(module, "TOGETHER", 1)
    models: dict[str, Any] = {"tiny": MODEL}
    runs = list(linear(MACHINE, models, [1, 3], repeats=2))
    assert [(run.layer, run.weights, run.rows) for run in runs] == [
        (layer, weights, rows)
        for layer in ("gate and up", "down")
        for weights in (
            "float32",
            "int4, groups of 32",
            "int8 per output",
            "fp8, blocks of 32",
            "int8, int8 activations",
        )
        for rows in (1, 3)
    ]
    assert all(len(run.us) == 2 and run.share > 0 for run in runs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is not there")
def test_a_product_runs_over_more_weights_than_a_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, int]] = []

    def layer(outputs: int, inputs: int) -> torch.nn.Module:
        shapes.append((outputs, inputs))
        return torch.nn.Linear(inputs, outputs, bias=False)

    monkeypatch.setattr(module, "formats", lambda _device, _dtype: {"plain": layer})
    monkeypatch.setattr(module, "TOGETHER", 3 * 64 * 32 * 4)
    runs = list(linear(MACHINE, {"tiny": MODEL}, [1], repeats=1))
    assert [(run.outputs, run.inputs) for run in runs] == [(64, 32), (32, 32)]
    assert (shapes.count((64, 32)), shapes.count((32, 32))) == (4, 7)


def test_the_table_has_median_time_and_share() -> None:
    run = LinearRun("m", "down", 4096, 14336, "int8 per output", 8, [30.0, 10.0, 20.0], 0.85)
    assert table([run])[-1] == "| m | down, 14336 to 4096 | int8 per output | 8 | 20.0 | 85.0% |"
