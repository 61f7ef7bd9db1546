import json
from pathlib import Path

import pytest

from tools.experiments.faults import store_changes
from tools.experiments.faults.store_changes import table


def test_a_row_counts_exact_delayed_and_failed_streams() -> None:
    raw = {"change": "purge", "rounds": 2, "exact": 8, "delays": [1.0, 4.04, 2.0], "failures": ["Internal: no"]}
    quiet = {"change": "pause", "rounds": 2, "exact": 80, "delays": [], "failures": []}
    lines = table([raw, quiet])
    assert "purge | 2 | 8 | 3 | 1 | 2.0 | 4.0" in lines[2]
    assert "pause | 2 | 80 | 0 | 0 | 0.0 | 0.0" in lines[3]


@pytest.mark.full
def test_every_stream_ends_exactly_or_with_503(tmp_path: Path) -> None:
    output = tmp_path / "changes.json"
    few = ["--rounds", "1", "--streams", "12", "--model", "smollm2-135m-instruct"]
    assert store_changes.main([*few, "--output", str(output)]) == 0
    assert {each["change"] for each in json.loads(output.read_text())["runs"]} == set(store_changes.CHANGES)
