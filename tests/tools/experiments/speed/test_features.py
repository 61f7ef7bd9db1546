import json
from pathlib import Path

import pytest

from tools.experiments.speed import features
from tools.experiments.speed.features import FEATURES, table


def test_a_cost_is_relative_to_plain_rows_right_before() -> None:
    ours = {"logprobs 5": [(100.0, 50.0), (200.0, 160.0), (300.0, 300.0)]}
    assert table({"pagewire": ours})[-1] == "| logprobs 5 | 160 | 1.25 |"
    theirs = {"logprobs 5": [(50.0, 40.0)] * 3}
    assert table({"pagewire": ours, "vllm": theirs})[-1] == "| logprobs 5 | 160 | 1.25 | 40 | 1.25 | 4.00x |"


def test_a_file_that_is_no_executable_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        features.main(["--vllm", str(tmp_path / "vllm")])
    assert "no executable" in capsys.readouterr().err


@pytest.mark.full
def test_every_feature_is_answered(tmp_path: Path) -> None:
    output = tmp_path / "features.json"
    assert features.main(["--rows", "4", "--tokens", "8", "--rounds", "1", "--output", str(output)]) == 0
    rates = json.loads(output.read_text())["figures"]["pagewire"]
    assert set(rates) == set(FEATURES)
    assert all(rate > 0 for (_, rate), *_ in rates.values())
