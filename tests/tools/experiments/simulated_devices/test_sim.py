import json
from pathlib import Path

import pytest

from tools.experiments.simulated_devices import sim
from tools.experiments.simulated_devices.sim import Figures, curve, table


def test_figures_are_shown_relative_to_one_replica() -> None:
    runs = [Figures(1, 9, 100.0, 0.02, 0.1, 0.7, 0.7, 1.0), Figures(4, 9, 390.0, 0.025, 0.2, 0.63, 0.7, 1.125)]
    lines = table(runs)
    assert "simulated" in lines[0]
    assert lines[-1] == "| 9 | 4 | 390 | 3.90 | 25 / 200 | 63.0% | 90.0% |"
    picture = curve(runs)
    assert "simulated" in picture
    assert picture.count("<polyline") == 2


def test_a_small_run_writes_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "WARM_UP", 1.0)
    load = sim.Load(clients=4, think=0.2, seconds=2.0, seed=0)
    runs = [sim.measure(replicas, load) for replicas in (1, 2)]
    assert 1.3 < runs[1].tokens_per_s / runs[0].tokens_per_s < 3
    assert all(0.1 < run.hit_rate < 1 for run in runs)
    assert all(run.ttft_p50 <= run.ttft_p99 for run in runs)
    output = tmp_path / "sim.json"
    arguments = [
        "--replicas",
        "1",
        "--clients",
        "2",
        "--think",
        "0.1",
        "--seconds",
        "2",
        "--jobs",
        "1",
        "--streams",
        "3",
    ]
    assert sim.main([*arguments, "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    assert record["simulated"] is True
    assert [run["replicas"] for run in record["runs"]] == [1]
    few, many = record["streams"]
    assert (few["slots"], many["slots"]) == (64, 256)
    assert 0 < few["bandwidth_share"] < 0.85, "what the roofline allows"
