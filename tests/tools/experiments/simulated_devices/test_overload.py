import json
from pathlib import Path

import pytest

from tools.experiments.simulated_devices import overload
from tools.experiments.simulated_devices.overload import Figures, Sent, ratios, summary, table

pytestmark = pytest.mark.alone


def test_a_refusal_is_compared_with_the_next_request_that_was_admitted() -> None:
    sent = [
        Sent(0.0, first=1.0, ended=3.0),
        Sent(1.0, refused=1.002, retry_after=8.0),
        Sent(2.0, error="deadline_exceeded"),
        Sent(3.0, first=11.0, ended=13.0),
        Sent(4.0, refused=4.004, retry_after=5.0),
    ]
    assert list(ratios(sent)) == [0.8], "nothing was admitted after the last refusal"


def test_the_table_has_every_figure() -> None:
    errors = {"deadline_exceeded": 1, "unavailable": 2}
    memory = {"tokenizer": [100.0, 101.0, 102.0]}
    lists = [3.0, 10.0], [1.0, 8.0], [2.0, 4.0], [0.8, 2.5]
    run = Figures(10.0, 5.0, "10s", [5.0, 5.0], 0.2, 10, *lists, errors, memory, 3.5)
    text = "\n".join(table(run))
    assert "simulated, 10 times the capacity for 5 s, max-queue-wait 10s" in text
    assert "| admitted P99 / steady P99 | 1.99 |" in text
    assert "| refused, ms to the refusal P50 / P99 | 3.0 / 4.0 |" in text
    assert "| retry_after within a factor of 2 | 50.0% |" in text
    assert "| expired with 408 | 1 |" in text
    assert "| other errors | 2 unavailable |" in text
    assert "| MiB of tokenizer | 100 → 101 → 102 |" in text
    assert summary(run)[-1] == "| 10x for 5 s | 2, 1.99 | 2 | 0.82–2.48 | 1 | 3.5 |"


@pytest.mark.full
def test_an_overload_is_refused_and_admitted_requests_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "OUTPUTS", (10, 40))
    output = tmp_path / "overload.json"
    arguments = ["--streams", "8", "--steady", "6", "--seconds", "6", "--max-queue-wait", "2s"]
    assert overload.main([*arguments, "--output", str(output)]) == 0
    (run,) = json.loads(output.read_text())["runs"]
    assert not run["errors"]
    assert len(run["latencies"]) + len(run["refusals_ms"]) == run["offered"]
    assert len(run["refusals_ms"]) > len(run["latencies"]) > 0
    assert all(0.1 < ratio < 10 for ratio in run["ratios"])
    assert run["memory"].keys() >= {"tokenizer", "scheduler", "executor", "detokenizer", "nats-server"}
    assert run["probe"] > 0
