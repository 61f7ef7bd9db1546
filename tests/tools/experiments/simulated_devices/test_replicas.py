import json
from pathlib import Path

import pytest

from tools.experiments._common import simulated_stack
from tools.experiments.simulated_devices import replicas
from tools.experiments.simulated_devices.replicas import Run, table

pytestmark = pytest.mark.alone


def test_factors_are_against_the_first_run() -> None:
    lines = table([Run(1, 16, 2.0, [200.0]), Run(4, 64, 2.0, [150.0, 200.0, 250.0, 200.0])])
    assert "simulated" in lines[0]
    assert lines[2:] == ["| 1 | 100 | 1.00 | 1.00 |", "| 4 | 400 | 4.00 | 1.25 |"]


def test_two_replicas_do_more_than_one_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_stack, "WARM_UP", 0.5)
    # Answers so short that both replicas take many within the second, wherever the first ones went.
    monkeypatch.setattr(replicas, "OUTPUT", 8)
    output = tmp_path / "replicas.json"
    assert replicas.main(["--replicas", "2", "--streams", "2", "--seconds", "1", "--output", str(output)]) == 0
    (run,) = json.loads(output.read_text())["runs"]
    assert (run["replicas"], run["streams"]) == (2, 4)
    assert len(run["sampled"]) == 2
    assert all(run["sampled"])
