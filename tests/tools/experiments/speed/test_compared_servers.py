"""The experiments that measure two servers in turn."""

import json
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from tools.experiments.speed import adapters, ranks


@pytest.mark.full
@pytest.mark.parametrize(
    ("experiment", "cases"),
    [(adapters.main, adapters.CASES), (ranks.main, {ranks.ONE, ranks.SEVERAL, ranks.AGAIN})],
)
def test_every_case_is_answered(experiment: Callable[[list[str]], int], cases: Collection[str], tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    assert experiment(["--model", "nano", "--clients", "2", "--rounds", "1", "--output", str(output)]) == 0
    (cell,) = json.loads(output.read_text())["runs"]
    assert set(cell["rates"]) == set(cases)
    assert all(rate > 0 for rates in cell["rates"].values() for rate in rates)
