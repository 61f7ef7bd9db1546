from typing import Any

import pytest

from pagewire.bench._chaos.checks import Refusal, Seen, SeenChoice, Verdict
from pagewire.bench._chaos.faults import Applied
from pagewire.bench._chaos.figures import Ended, examine, failures, pauses, rows, table
from pagewire.bench._chaos.requests import Request
from pagewire.bench._chaos.schedule import Fault

STREAM = Request(7, "nats", "greedy", "Once", {})
KILL = Applied(Fault("kill:executor"), 10.0, 10.1, 13.0)
AGAIN = Applied(Fault("kill:executor"), 20.0, 20.1, 22.0)
FULL = Applied(Fault("full:broker", seconds=2.0), 30.0, 32.0, 33.0)
DRAIN = Applied(Fault("term:gateway"), 40.0, 41.0, 42.0)
FAULTS = [KILL, AGAIN, FULL, DRAIN]
EXACT, LOST = Verdict("exact"), Verdict("lost", "gone")


def ended(began: float, end: float, *progress: float, verdict: Verdict = EXACT, shape: str = "greedy") -> Ended:
    request = Request(7, "nats", shape, "Once", {})
    return Ended(request, Seen(began, ended=end, progress=list(progress)), verdict)


def test_the_longest_pause_of_each_fault_counts() -> None:
    table_rows = rows(
        FAULTS,
        [
            ended(9.0, 15.0, 9.9, 12.4, 14.0),
            ended(9.0, 13.0, 9.9, 10.4, 12.0),
            ended(9.0, 19.0, shape="beams"),
            ended(19.0, 23.0, 19.9, 21.0, 22.9),
            ended(5.0, 6.0),
        ],
    )
    (row,) = (row for row in table_rows if row.kind == "kill:executor")
    assert [round(pause, 6) for pause in row.pauses] == [2.5, 1.9]
    assert (row.faults, row.requests) == (2, 4)


def test_a_pause_belongs_to_the_fault_that_had_most_of_it() -> None:
    (first, second, *_) = pauses(FAULTS, [ended(12.5, 23.0, 21.5)])
    assert (first.seconds, second.seconds) == (0.0, 9.0)
    assert (second.began, second.request) == (12.5, "request 7 (greedy over nats)")


def test_a_failure_belongs_to_the_last_fault_before_it() -> None:
    table_rows = rows(FAULTS, [ended(9.0, 21.0, verdict=LOST), ended(25.0, 26.0, verdict=LOST)])
    assert {row.kind: row.outcomes["lost"] for row in table_rows} == {
        "kill:executor": 1,
        "full:broker": 0,
        "term:gateway": 0,
        "none": 1,
    }


def test_only_full_stores_and_draining_services_may_refuse() -> None:
    def outcome(at: float, **fields: Any) -> str:
        expected = Seen(0.0, choices={0: SeenChoice("a")})
        refused = Seen(at - 1, ended=at + 1, choices={0: SeenChoice("a")}, refusals=[Refusal(at, "full", **fields)])
        return examine(STREAM, expected, refused, FAULTS).verdict.outcome

    assert outcome(31.0, accepted=False) == outcome(31.0, accepted=True) == "exact"
    assert outcome(36.0, accepted=False) == "exact"
    assert outcome(39.0, accepted=False) == "lost", "there is room for long"
    assert outcome(41.0, accepted=False) == "exact"
    assert outcome(41.0, accepted=True) == "lost", "a drain ends what was accepted"
    assert outcome(11.0, accepted=False) == "lost"


@pytest.mark.parametrize(
    ("kind", "after", "accepted", "expected"),
    [
        ("purge:store", 9.0, True, "exact"),
        ("purge:store", 11.0, True, "lost"),
        ("damage:broker", 25.0, False, "exact"),
        ("damage:broker", 35.0, False, "lost"),
        ("join:version", -0.5, False, "exact"),
        ("join:version", -0.5, True, "lost"),
    ],
)
def test_a_request_lost_by_the_store_may_be_refused_for_a_while(
    kind: str, after: float, accepted: bool, expected: str
) -> None:
    fault = Applied(Fault(kind), 10.0, 10.1, 13.0)
    at = fault.recovered + after
    whole = Seen(0.0, choices={0: SeenChoice("a")})
    refused = Seen(9.0, ended=at + 1, choices={0: SeenChoice("a")}, refusals=[Refusal(at, "gone", accepted)])
    assert examine(STREAM, whole, refused, [fault]).verdict.outcome == expected


def test_the_table_has_a_line_per_kind_and_one_for_all() -> None:
    table_rows = rows(FAULTS, [ended(9.0, 13.0, 9.9, 12.4), ended(9.0, 13.0, verdict=LOST)])
    lines = table("sim:h100 (simulated)", table_rows, cold_start=2.25)
    assert lines[0].startswith("| sim:h100 (simulated) | faults | requests | lost | duplicated |")
    assert lines[2] == "| kill:executor (cold start 2.2 s) | 2 | 2 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 2.00 | 4.00 |"
    assert lines[-1].startswith("| all | 4 | 2 | 1 |")


def test_a_failure_is_told_with_its_fault_and_its_reason() -> None:
    (line,) = failures([ended(9.0, 13.0), ended(9.0, 13.0, verdict=LOST)], FAULTS, start=5.0)
    assert line == ("lost: request 7 (greedy over nats), 4.0 to 8.0 s, kill:executor of 0.0 s at 5.0 s: gone")
