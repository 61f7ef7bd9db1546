import json
from dataclasses import replace
from pathlib import Path

import pytest

from pagewire.bench import pipeline
from pagewire.bench.pipeline import Figures, table


def test_rates_and_costs() -> None:
    run = Figures("nats", 256, 2.0, 1000, 500, {"scheduler": 1.26, "client": 3.0})
    assert run.rate == 500
    later = replace(run, backlog=[3, 90, 40])
    head, line, other = table([run, later])
    assert "simulated" in head
    assert " ".join(line.split()) == "nats 256 streams 500 tokens/s 2.00 tokens/frame client 3.0 scheduler 1.3"
    assert " ".join(other.split()).endswith("scheduler 1.3 backlog at most 90, at the end 40 tokens")


@pytest.mark.full
@pytest.mark.parametrize("transport", ["nats", "http"])
def test_it_measures_every_process(tmp_path: Path, transport: str) -> None:
    output = tmp_path / "pipeline.json"
    arguments = ["--streams", "4", "--seconds", "1", "--transport", transport, "--output", str(output)]
    assert pipeline.main(arguments) == 0
    (run,) = json.loads(output.read_text())
    assert run["tokens"] > 0
    assert run["frames"] > 0
    assert bool(run["backlog"]) == (transport == "nats")
    expected = {"client", "detokenizer", "executor", "nats-server", "scheduler", "tokenizer"}
    assert run["cpu_us_per_token"].keys() == expected | ({"gateway"} if transport == "http" else set())
