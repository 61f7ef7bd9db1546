"""The bench of the bandwidth measures products and reads of the same size."""

import json
from pathlib import Path

import pytest

from pagewire.bench import bandwidth


def test_each_scheme_is_measured_beside_a_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "LAYER", ((96, 64), (64, 128)))
    monkeypatch.setattr(bandwidth, "VOCABULARY", (320, 64))
    output = tmp_path / "bandwidth.json"
    assert bandwidth.main(["--turns", "2", "--layers", "3", "--threads", "1", "--output", str(output)]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[2:]] == ["bf16", "int8", "int4"]
    runs = json.loads(output.read_text())["runs"]
    weights = 3 * (96 * 64 + 64 * 128) + 320 * 64
    assert runs[0]["nbytes"] == 2 * weights
    assert runs[2]["nbytes"] < runs[1]["nbytes"] < 1.2 * weights
    for run in runs:
        assert len(run["product_s"]) == len(run["read_s"]) == 2
