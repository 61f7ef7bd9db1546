import json
from pathlib import Path

import pytest

from pagewire.bench._chaos.checks import Seen, Verdict
from pagewire.bench._chaos.figures import Ended
from pagewire.bench._chaos.requests import Request
from tools.experiments.faults import long_queue
from tools.experiments.faults.long_queue import Outcome, note, table


def test_a_row_counts_exact_and_failed_requests() -> None:
    outcome = Outcome("kill")
    request = Request(0, "nats", "greedy", "Once", {})
    for wait, verdict in ((3.0, Verdict("exact")), (5.5, Verdict("lost", "it was not queued"))):
        note(outcome, [Ended(request, Seen(1.0, ended=9.0, progress=[1.1, 1.0 + wait]), verdict)])
    assert outcome.failures == ["lost: request 0 (greedy over nats): it was not queued"]
    raw = {"case": "kill", "rounds": 2, "requests": 2, "exact": 1, "failures": outcome.failures, "waits": outcome.waits}
    assert "kill | 2 | 2 | 1 | 1 | 4.2 | 5.5" in table([raw])[2]


@pytest.mark.full
@pytest.mark.parametrize("case", long_queue.CASES)
def test_a_long_queue_outlives_its_services(case: str, tmp_path: Path) -> None:
    output = tmp_path / "queue.json"
    few = ["--rounds", "1", "--model", "smollm2-135m-instruct", "--cases", case]
    assert long_queue.main([*few, "--output", str(output)]) == 0
    (run,) = json.loads(output.read_text())["runs"]
    assert run["exact"] == run["requests"] == 70
