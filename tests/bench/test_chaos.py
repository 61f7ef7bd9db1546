import json
from pathlib import Path

import pytest

from pagewire.bench import chaos

pytestmark = pytest.mark.alone


@pytest.mark.parametrize("wrong", ["burn", "kill:nobody", ""])
def test_a_fault_that_does_not_exist_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        chaos.main(["--kinds", wrong])
    assert "kill:executor" in capsys.readouterr().err


@pytest.mark.full
def test_a_short_run_with_two_executors_loses_no_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "chaos.json"
    few = ["--kinds", "kill:executor,stop:scheduler", "--executors", "2", "--clients", "4", "--minutes", "0.2"]
    model = ["--device", "sim:h100", "--model", "smollm2-135m-instruct"]
    code = chaos.main([*few, *model, "--json", str(output)])
    (run,) = json.loads(output.read_text())["runs"]
    assert code == 0, run["failures"]
    assert run["simulated"]
    assert run["executors"] == 2
    assert {fault["kind"] for fault in run["faults"]} <= {"kill:executor", "stop:scheduler"}
    assert sum(row["requests"] for row in run["rows"]) > 0
    assert "sim:h100 (simulated), 2 executors" in capsys.readouterr().out
