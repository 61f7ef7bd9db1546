import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pagewire.shared.telemetry import span_files, tracing

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def run(body: str, folder: Path, **environ: str) -> str:
    """Runs code in a process of its own: a process has one tracer."""
    code = "from pagewire.shared.telemetry import tracing\nfrom pagewire.shared.settings.config import Settings\n"
    code += f"FOLDER = {str(folder)!r}\nPARENT = {PARENT!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", code + textwrap.dedent(body)], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tracing_is_off_without_a_destination() -> None:
    with tracing.tracer().start_as_current_span("receive", context=tracing.extract({"traceparent": PARENT})) as span:
        headers: dict[str, str] = {}
        tracing.inject(headers, span)
    assert headers == {}
    assert tracing.traceparent(span) == ""
    assert tracing.extract({"traceparent": PARENT}) is None
    tracing.span("queue", PARENT, 1.0, 2.0)


def test_spans_are_written_with_their_parents(tmp_path: Path) -> None:
    out = run(
        """
        tracing.configure("tokenizer", "i1", Settings(trace_dir=FOLDER))
        headers = {}
        context = tracing.extract({"traceparent": PARENT})
        with tracing.tracer().start_as_current_span("receive", context=context, attributes={"tokens": 3}) as span:
            span.set_attribute("request_id", "r1")
            tracing.inject(headers, span)
        tracing.span("queue", headers["traceparent"], 10.0, 10.5, {"names": ("a", "b")})
        tracing.span("queue", "", 10.0, 10.5)
        print(headers["traceparent"])
        """,
        tmp_path,
    )
    receive, queue = span_files.read(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer-i1.jsonl"]
    assert (receive.name, receive.service, receive.instance) == ("receive", "tokenizer", "i1")
    assert receive.trace_id == queue.trace_id == TRACE
    assert receive.parent_id == "b7ad6b7169203331"
    assert receive.attributes == {"tokens": 3, "request_id": "r1"}
    assert out.strip() == f"00-{TRACE}-{receive.span_id}-01"
    assert queue.parent_id == receive.span_id
    assert (queue.start, queue.end) == (10.0, 10.5)
    assert queue.attributes == {"names": ["a", "b"]}


def test_a_trace_that_its_caller_does_not_sample_is_dropped(tmp_path: Path) -> None:
    run(
        """
        tracing.configure("tokenizer", "i1", Settings(trace_dir=FOLDER))
        context = tracing.extract({"traceparent": PARENT[:-1] + "0"})
        with tracing.tracer().start_as_current_span("receive", context=context) as span:
            assert tracing.traceparent(span).endswith("-00")
        """,
        tmp_path,
    )
    assert list(span_files.read(tmp_path)) == []


@pytest.mark.parametrize(
    ("environ", "on"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, False),
        ({}, False),
    ],
)
def test_the_standard_variables_turn_tracing_on(environ: dict[str, str], on: bool, tmp_path: Path) -> None:
    out = run(
        """
        tracing.configure("tokenizer", "i1", Settings())
        print(tracing.tracer().start_span("x").is_recording())
        """,
        tmp_path,
        **environ,
    )
    assert out.strip() == str(on)


def test_a_line_that_a_crash_cut_off_is_skipped(tmp_path: Path) -> None:
    Path(tmp_path, "a.jsonl").write_text(
        '{"name":"x","service":"s","instance":"i","trace_id":"t","span_id":"p","start":1.0,"end":2.0}\n{"name":"y"'
    )
    assert [span.name for span in span_files.read(tmp_path)] == ["x"]
