"""The bench of the CPU step measures both paths and says where the time goes."""

import json
from pathlib import Path

import pytest

from pagewire.bench import cpu_step


@pytest.mark.parametrize("other", ["transformers", "int8-kv"])
def test_both_paths_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str) -> None:
    output = tmp_path / "steps.json"
    flags = ["--models", "nano", "--rows", "1", "3", "--contexts", "20", "--seconds", "0", "--threads", "1"]
    flags += ["--against", other, "--dtype", "float32" if other == "transformers" else "auto"]
    flags += ["--query-len", "2" if other == "int8-kv" else "1"]
    assert cpu_step.main([*flags, "--output", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.split()[:2] == ["llama", "nano"] for line in lines) == 2 * 2
    cases = json.loads(output.read_text())["runs"]
    assert [(case["path"], case["rows"]) for case in cases] == [
        ("compiled", 1), (other, 1), ("compiled", 3), (other, 3),
    ]  # fmt: skip
    for case in cases:
        assert len(case["wall_ms"]) == len(case["cpu_ms"]) >= 5
        assert set(case["shares"]) == {*cpu_step.PARTS, "other"}
        assert sum(case["shares"].values()) == pytest.approx(1)
        assert all(0 <= share < 1 for share in case["shares"].values())


def test_a_family_with_two_kinds_of_layers_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "steps.json"
    flags = ["--models", "nano", "--rows", "2", "--contexts", "20", "--seconds", "0", "--threads", "1"]
    flags += ["--families", "gemma2", "--against", "transformers", "--output", str(output)]
    assert cpu_step.main(flags) == 0
    assert {case["family"] for case in json.loads(output.read_text())["runs"]} == {"gemma2"}


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(SystemExit):
        cpu_step.main(["--models", "s9000"])
