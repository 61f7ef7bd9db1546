import json
from pathlib import Path

import pytest

from tools.experiments._common import simulated_stack
from tools.experiments.simulated_devices import busy
from tools.experiments.simulated_devices.busy import Run, table

pytestmark = pytest.mark.alone


def test_shares_are_of_the_counted_time() -> None:
    lines = table([Run(8, 64, 10.0, busy_s=9.8, waiting_s=0.1, steps=980, rows=49000, sampled=48000)])
    assert "simulated" in lines[0]
    assert lines[2] == "| 64 | 8 | 98.00% | 1.00% | 4800 |"


def test_each_window_gets_a_stack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated_stack, "WARM_UP", 0.5)
    output = tmp_path / "busy.json"
    assert busy.main(["--windows", "8", "--streams", "2", "--seconds", "1", "--output", str(output)]) == 0
    (run,) = json.loads(output.read_text())["runs"]
    assert (run["window"], run["streams"]) == (8, 2)
    assert run["steps"] > 0
    assert 0 < run["busy_s"] < 1.2 * run["seconds"]
    assert "simulated" in capsys.readouterr().out
