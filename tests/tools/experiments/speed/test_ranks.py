import json
from pathlib import Path

import pytest

from tools.experiments._common.turns import Cell
from tools.experiments.speed import ranks
from tools.experiments.speed.ranks import AGAIN, ONE, SEVERAL


def test_ratios_are_of_the_same_round() -> None:
    rates = {ONE: [100.0, 50.0], SEVERAL: [90.0, 48.0], AGAIN: [100.0, 50.0]}
    row = ranks.table([Cell("s1b bf16", "pagewire", 8, rates)])[-1]
    assert row == "| s1b bf16, pagewire, 8 | 75.0 | 1.00 | 0.93 (0.90–0.96) |"


@pytest.mark.full
def test_every_case_is_answered(tmp_path: Path) -> None:
    output = tmp_path / "ranks.json"
    assert ranks.main(["--model", "nano", "--clients", "2", "--rounds", "1", "--output", str(output)]) == 0
    (cell,) = json.loads(output.read_text())["runs"]
    assert set(cell["rates"]) == {ONE, AGAIN, SEVERAL}
    assert all(rate > 0 for rates in cell["rates"].values() for rate in rates)
