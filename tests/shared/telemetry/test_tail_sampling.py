"""Which traces are kept that the sampler has left out."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from opentelemetry.trace import Span, StatusCode, set_span_in_context

from pagewire.shared.telemetry import tail_sampling
from pagewire.shared.telemetry.tail_sampling import RecordAll, TailBuffer


class Exported(SpanProcessor):
    """An exporter that keeps its spans."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_end(self, span: ReadableSpan) -> None:
        if span.context.trace_flags.sampled:
            self.names.append(span.name)


@dataclass
class Process:
    """The tracer of one process."""

    sampler: Sampler = ALWAYS_OFF
    exported: Exported = field(default_factory=Exported)
    announced: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buffer = TailBuffer([self.exported], limit=1.0)
        self.buffer.announce = self.announced.append
        provider = TracerProvider(RecordAll(self.sampler), shutdown_on_exit=False)
        provider.add_span_processor(self.exported)
        provider.add_span_processor(self.buffer)
        self.tracer = provider.get_tracer("test")

    def span(self, name: str, took: float = 0.1, parent: Span | None = None, *, failed: bool = False) -> Span:
        context = set_span_in_context(parent) if parent is not None else None
        span = self.tracer.start_span(name, context, start_time=0)
        if failed:
            span.set_status(StatusCode.ERROR)
        span.end(int(took * 1e9))
        return span


def test_a_fast_trace_without_errors_is_not_exported() -> None:
    process = Process()
    process.span("receive")
    assert process.exported.names == []
    assert process.announced == []


@pytest.mark.parametrize(
    "end", [lambda p, s: p.span("stream", 1.1, s), lambda p, s: p.span("stream", parent=s, failed=True)]
)
def test_a_slow_or_failed_trace_is_exported_with_all_spans(end: Callable[[Process, Span], Span]) -> None:
    process = Process()
    first = process.span("receive")
    process.span("other")
    end(process, first)
    process.span("decode", parent=first)
    assert process.exported.names == ["receive", "stream", "decode"]
    assert process.announced == [first.get_span_context().trace_id]


def test_the_decision_of_another_process_is_followed_and_not_announced_again() -> None:
    process = Process()
    first = process.span("prefill")
    process.buffer.keep(first.get_span_context().trace_id)
    process.span("decode", parent=first, failed=True)
    assert process.exported.names == ["prefill", "decode"]
    assert process.announced == []


def test_a_sampled_span_is_exported_once() -> None:
    process = Process(ALWAYS_ON)
    process.span("receive", 5.0)
    assert process.exported.names == ["receive"]


def test_the_oldest_trace_is_dropped_when_too_many_spans_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_sampling, "MAX_HELD", 2)
    process = Process()
    first, second = process.span("a"), process.span("b")
    process.span("c")
    process.buffer.keep(first.get_span_context().trace_id)
    process.buffer.keep(second.get_span_context().trace_id)
    assert process.exported.names == ["b"]
