"""The figures of a simulated run."""

import pytest

from tests.tools.experiments.simulated_devices.virtual_time.cases import request, serve
from tools.experiments.simulated_devices.virtual_time.figures import figures, mean


def test_a_run_has_rates_latencies_and_waste() -> None:
    run = figures(serve(request(0.0, 100, 4), request(1.0, 100, 4, first=500)))
    span = 1.0 + 41.03e-3
    assert run["requests_per_s"] == pytest.approx(2 / span)
    assert run["tokens_per_s"] == pytest.approx(8 / span)
    assert run["busy"] == pytest.approx(1.0)
    assert [run["ttft_median"], run["ttft_p99"]] == pytest.approx([11e-3] * 2)
    assert [run["tpot_p90"], run["itl_p95"]] == pytest.approx([10.01e-3] * 2)
    assert 0 < run["waste"] < 1
    assert 0 < run["waste_running"] < run["waste"]
    assert run["waste_queued"] == run["preemptions"] == 0.0
    assert run["row_steps"] == 8


def test_a_request_of_one_token_has_no_time_per_token() -> None:
    run = figures(serve(request(0.0, 100, 1)))
    assert "ttft_median" in run
    assert "itl_median" not in run


def test_figures_are_means_over_seeds() -> None:
    assert mean([{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 2.0}]) == {"a": 2.0, "b": 2.0}
