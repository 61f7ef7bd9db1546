"""The bench of the bandwidth measures products and reads of the same size."""

import json
from pathlib import Path

import pytest

from pagewire.bench import bandwidth


def test_each_scheme_is_measured_beside_a_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "LAYER", ((96, 256), (64, 512)))
    monkeypatch.setattr(bandwidth, "VOCABULARY", (320, 256))
    output = tmp_path / "bandwidth.json"
    assert bandwidth.main(["--turns", "2", "--layers", "3", "--threads", "1", "--output", str(output)]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[2:]] == list(bandwidth.SCHEMES)
    runs = json.loads(output.read_text())["runs"]
    weights = 3 * (96 * 256 + 64 * 512) + 320 * 256
    assert runs[0]["nbytes"] == 2 * weights
    assert runs[2]["nbytes"] < runs[1]["nbytes"] < 1.2 * weights
    assert runs[3]["nbytes"] < runs[4]["nbytes"] < runs[5]["nbytes"] < 6.6 / 8 * weights
    for run in runs:
        assert len(run["product_s"]) == len(run["read_s"]) == 2
