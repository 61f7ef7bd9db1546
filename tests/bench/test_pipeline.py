import json
from pathlib import Path

import pytest

from pagewire.bench import pipeline
from pagewire.bench.pipeline import Figures, table, waiting_table


def test_the_table_has_rates_and_cpu_costs() -> None:
    run = Figures("nats", 256, 2.0, 1000, 500, {"scheduler": 1.26, "client": 3.0})
    assert run.rate == 500
    head, _, line = table([run])
    assert head.startswith("| simulated | tokens/s | frames/token | client | tokenizer | scheduler |")
    assert line == "| nats, 256 streams, 2 s | 500 | 0.50 | 3.0 |  | 1.3 |  |  |  |  |"


def test_the_table_has_waiting_streams_and_the_gateways_memory() -> None:
    run = Figures("http", 8, 2.0, 1000, 500, {}, waiting=30, answered=38, gateway_mb=[60.0, 62.04, 61.0])
    assert waiting_table([run])[-1] == "| 8 active, 30 waiting | 38 | 0 | 60.0 | 62.0 | 61.0 |"


def test_only_http_has_streams_that_wait(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pipeline.main(["--waiting", "5"])
    assert "--transport http" in capsys.readouterr().err


@pytest.mark.full
def test_streams_that_wait_are_answered_at_the_end(tmp_path: Path) -> None:
    output = tmp_path / "pipeline.json"
    arguments = ["--streams", "4", "--seconds", "1", "--transport", "http", "--waiting", "20", "--output", str(output)]
    assert pipeline.main(arguments) == 0
    (run,) = json.loads(output.read_text())["runs"]
    assert (run["failed"], run["answered"] >= 24, len(run["gateway_mb"])) == (0, True, 1)


@pytest.mark.full
@pytest.mark.parametrize("transport", ["nats", "http"])
def test_every_process_is_measured(tmp_path: Path, transport: str) -> None:
    output = tmp_path / "pipeline.json"
    arguments = ["--streams", "1", "--seconds", "1", "--transport", transport, "--output", str(output)]
    assert pipeline.main(arguments) == 0
    (run,) = json.loads(output.read_text())["runs"]
    assert run["tokens"] > 0
    assert run["frames"] > 0
    assert bool(run["backlog"]) == (transport == "nats")
    expected = {"client", "detokenizer", "executor", "nats-server", "scheduler", "tokenizer"}
    assert run["cpu_us_per_token"].keys() == expected | ({"gateway"} if transport == "http" else set())
