import json
from pathlib import Path

import pytest

from tools.experiments.speed import lease
from tools.experiments.speed.lease import Run, table


def test_the_table_has_shares_and_ratios() -> None:
    runs = [
        Run(1, [10.0, 30.0, 20.0], waiting_s=2.0, busy_s=7.0, wall_s=10.0, sampled=500),
        Run(8, [22.0, 20.0, 24.0], waiting_s=0.1, busy_s=9.5, wall_s=10.0, sampled=700),
    ]
    head, _, first, second = table(runs)
    assert head.startswith("| window |")
    assert first == "| 1 | 20.00 | 1.00 (0.50–1.50) | 20.00% | 50 |"
    assert second == "| 8 | 22.00 | 1.10 (1.00–1.20) | 1.00% | 70 |"


@pytest.mark.full
def test_each_window_gets_a_stack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "lease.json"
    arguments = ["--windows", "1", "8", "--samples", "2", "--rounds", "1", "--streams", "2", "--output", str(output)]
    assert lease.main(arguments) == 0
    runs = json.loads(output.read_text())["runs"]
    assert [run["window"] for run in runs] == [1, 8]
    assert all(len(run["first_token_ms"]) == 2 and run["sampled"] > 0 for run in runs)
    assert "waiting" in capsys.readouterr().out
