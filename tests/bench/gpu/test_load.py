"""Observations of clients become figures, and the pipeline serves a load; on a CPU no time means anything."""

from typing import Any

import pytest
import torch

from pagewire.bench._common.loads import Request
from pagewire.bench._gpu import load as module
from pagewire.bench._gpu.load import LoadRun, figures, load, table
from pagewire.bench.shapes import SHAPES
from tests.bench.gpu.cases import MODEL


def served(at: float, *tokens_at: float) -> Request:
    return Request(at, [1, 2], len(tokens_at), tokens_at=list(tokens_at))


def test_figures_equal_hand_computed_ones() -> None:
    run = figures("e", "m", 64, 2.0, [served(0.0, 1.0, 2.0, 4.0), served(1.0, 1.5, 5.0)])
    assert (run.requests, run.requests_per_s, run.tokens_per_s) == (2, 0.4, 1.0)
    assert run.ttft_median == 0.75
    assert run.itl_median == 2.0
    assert run.itl_p99 <= 3.5


def test_a_request_of_one_token_has_no_interval() -> None:
    assert figures("e", "m", 64, 2.0, [served(0.0, 1.0)]).itl_median == 0.0


def test_the_table_has_latencies_in_milliseconds() -> None:
    run = LoadRun("e", "m", 64, 2.0, 9, 1.5, 300.4, 0.1, 0.25, 0.0104, 0.02, 0.982, 60.5, 0.5)
    assert table([run])[-1] == ("| e | m | 64 | 2.00 | 1.50 | 300 | 100 / 250 | 10.4 / 20.0 | 98.2% | 60.5 | 50.0% |")


@pytest.mark.full
def test_the_pipeline_serves_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(draw: Any, count: int) -> list[Request]:
        return [Request(0.0, draw.choices(range(90), k=6), 4) for _ in range(count)]

    monkeypatch.setattr(module, "sharegpt", short)
    monkeypatch.setitem(SHAPES, "tiny", MODEL)
    (run,) = load({"tiny": MODEL}, [2], count=5, bandwidth=1e9, device=torch.device("cpu"))
    assert (run.engine, run.requests, run.streams) == ("pagewire", 5, 2)
    assert run.tokens_per_s > run.requests_per_s > 0
    assert 0 < run.busy <= 1
    assert 0 < run.rows_per_step <= 2
