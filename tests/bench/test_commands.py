import pkgutil

import pytest

import pagewire.bench
from pagewire import cli

NAMES = [module.name for module in pkgutil.iter_modules(pagewire.bench.__path__) if module.name[0] != "_"]


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_describes_its_measurement(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", name, "--help"])
    assert ended.value.code == 0
    help_text = capsys.readouterr().out
    assert help_text.startswith(f"usage: pagewire bench {name}")
    assert len(help_text.split("\n\n")[1].split()) > 10, "the help does not say what is measured"
