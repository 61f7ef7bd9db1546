"""The figures of a simulated run."""

import pytest

from tests.tools.experiments.simulation.cases import request, serve
from tools.experiments.simulation.figures import figures, mean


def test_figures_of_a_run() -> None:
    found = figures(serve(request(0.0, 100, 4), request(1.0, 100, 4, first=500)))
    span = 1.0 + 41.03e-3
    assert found["requests_per_s"] == pytest.approx(2 / span)
    assert found["tokens_per_s"] == pytest.approx(8 / span)
    assert found["busy"] == pytest.approx(1.0)
    assert [found["ttft_median"], found["ttft_p99"]] == pytest.approx([11e-3] * 2)
    assert [found["tpot_p90"], found["itl_p95"]] == pytest.approx([10.01e-3] * 2)
    assert 0 < found["waste"] < 1
    assert 0 < found["waste_running"] < found["waste"]
    assert found["waste_queued"] == found["preemptions"] == 0.0
    assert found["row_steps"] == 8


def test_a_request_of_one_token_has_no_time_per_token() -> None:
    found = figures(serve(request(0.0, 100, 1)))
    assert "ttft_median" in found
    assert "itl_median" not in found


def test_mean_over_seeds() -> None:
    assert mean([{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 2.0}]) == {"a": 2.0, "b": 2.0}
