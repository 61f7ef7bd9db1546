"""`python -m tools.experiments NAME`."""

import pytest

from pagewire.shared.errors import ConfigurationError
from tools.experiments.__main__ import main
from tools.experiments._common.experiment_files import EXPERIMENTS
from tools.experiments.speed import lease


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_describes_its_measurement(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    usage, text, *_ = capsys.readouterr().out.split("\n\n")
    assert usage.startswith(f"usage: python -m tools.experiments {name}")
    assert len(text.split()) > 10, "the help does not say what is measured"


def test_an_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(arguments: list[str]) -> int:
        raise ConfigurationError("there is no model")

    monkeypatch.setattr(lease, "main", refuse)
    assert main(["lease"]) == 2
    assert capsys.readouterr().err == "python -m tools.experiments: there is no model\n"
