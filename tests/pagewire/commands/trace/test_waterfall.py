import pytest

from pagewire.commands.trace import waterfall
from pagewire.shared.subjects import owned
from pagewire.shared.telemetry import span_files
from pagewire.shared.telemetry.span_files import Span


def span(name: str, start: float, end: float, trace: str = "t1", request: str = "") -> Span:
    attributes: dict[str, str | bool | int | float | list[str | bool | int | float]] = (
        {"request_id": request} if request else {}
    )
    return Span(name, "service", "i", trace, name, start, end, attributes=attributes)


SPANS = [
    span("decode", 10.3, 11.0),
    span("receive", 10.0, 10.1, request="r1"),
    span("queue", 10.1, 10.2, request="r1"),
    span("prefill", 10.2, 10.3),
    span("receive", 10.0, 10.1, trace="t2", request="r2"),
    span("stream", 10.0, 10.1, trace="t4", request=owned("alice", "r4")),
]


def test_a_request_is_its_whole_trace_in_order() -> None:
    assert [span.name for span in span_files.of_request(SPANS, "r1")] == ["receive", "queue", "prefill", "decode"]
    assert span_files.of_request(SPANS, "r3") == []


def test_an_id_of_an_http_answer_or_header_finds_its_request() -> None:
    spans = [*SPANS, span("receive", 1.0, 2.0, trace="t9", request="r9-0123abcd")]
    for name in ("cmpl-r9-0123abcd", "chatcmpl-r9-0123abcd", "msg_r9-0123abcd", "resp_r9-0123abcd", "r9"):
        assert [span.trace_id for span in span_files.of_request(spans, name)] == ["t9"]


def test_the_request_of_a_tenant_is_found_by_the_id_that_its_client_knows() -> None:
    assert [span.name for span in span_files.of_request(SPANS, "r4")] == ["stream"]


@pytest.mark.parametrize("name", ["r1", "cmpl-r1", "chatcmpl-r1"])
def test_the_id_of_an_http_answer_names_its_request(name: str) -> None:
    assert len(span_files.of_request(SPANS, name)) == 4


def test_the_slowest_requests_are_listed_with_their_stages() -> None:
    slow = [*SPANS, span("receive", 5.0, 7.5, trace="t3", request=owned("alice", "r3"))]
    assert [spans[0].trace_id for spans in waterfall.slowest(slow, 2)] == ["t3", "t1"]
    head, *lines = waterfall.table(waterfall.slowest(slow, 2))
    assert head.split() == ["request", "ms", *waterfall.STAGES]
    assert lines[0].split() == ["r3", "2500.0", "2500.0", *["0.0"] * 7]
    assert lines[1].split() == ["r1", "1000.0", "100.0", "100.0", "0.0", "100.0", "700.0", *["0.0"] * 3]


def test_bars_share_one_scale() -> None:
    lines = waterfall.draw(span_files.of_request(SPANS, "r1"), width=10)
    bars = [line.partition("  ")[2][-10:] if "█" in line else "" for line in lines]
    assert len(lines) == 5
    assert bars[0] == ""
    assert lines[1].endswith("100.0  █")
    assert lines[4].endswith("700.0  " + " " * 3 + "█" * 7)


def test_single_steps_are_not_drawn() -> None:
    lines = waterfall.draw([*SPANS[:2], span("step", 10.3, 10.4)])
    assert len(lines) == 3


def test_a_request_without_duration_has_bars() -> None:
    assert waterfall.draw([span("receive", 5.0, 5.0)])[1].endswith("█")


def test_shares_are_of_the_whole_time() -> None:
    shares = waterfall.shares(span_files.of_request(SPANS, "r1"))
    assert {stage: round(share, 3) for stage, (_, share) in shares.items()} == {
        "receive": 0.1,
        "queue": 0.1,
        "admit": 0.0,
        "prefill": 0.1,
        "decode": 0.7,
        "preempted": 0.0,
        "recover": 0.0,
        "stream": 0.0,
    }
