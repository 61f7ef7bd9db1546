"""Keeps the traces of slow and failed requests that the sampler has dropped (tail sampling).

Every process records the spans of all requests and holds the latest in memory. The first process in which a span ends
with an error, or is longer than the limit, has all processes export the spans of that trace, held and future ones.
"""

from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import Attributes
from typing_extensions import override

MAX_HELD = 16384
"""Maximum number of spans that a process holds; beyond it the oldest trace is dropped."""
MAX_KEPT = 4096
"""Maximum number of kept traces whose later spans are still exported."""


class RecordAll(Sampler):
    """Records the spans that another sampler drops, without marking them as sampled."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    @override
    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        result = self._sampler.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)
        if result.decision is not Decision.DROP:
            return result
        return SamplingResult(Decision.RECORD_ONLY, attributes, result.trace_state)

    @override
    def get_description(self) -> str:
        return self._sampler.get_description()


class TailBuffer(SpanProcessor):
    """Holds the spans of traces that are not sampled.

    Args:
        destinations: processors that get the spans of a kept trace.
        limit: seconds; a trace with a longer span is kept.

    Attributes:
        announce: called with each trace that this process has decided to keep.
    """

    def __init__(self, destinations: Sequence[SpanProcessor], limit: float) -> None:
        self.announce: Callable[[int], None] = lambda _: None
        self._destinations = destinations
        self._limit = limit * 1e9
        self._held: dict[int, list[ReadableSpan]] = {}
        self._count = 0
        self._kept: dict[int, None] = {}

    @override
    def on_end(self, span: ReadableSpan) -> None:
        if span.context.trace_flags.sampled:
            return
        trace = span.context.trace_id
        if trace in self._kept:
            self._export(span)
            return
        self._held.setdefault(trace, []).append(span)
        self._count += 1
        while self._count > MAX_HELD:
            self._count -= len(self._held.pop(next(iter(self._held))))
        if span.status.status_code is StatusCode.ERROR or _duration(span) > self._limit:
            self.keep(trace)
            self.announce(trace)

    def keep(self, trace: int) -> None:
        """Exports the held spans of a trace, and future ones as they end."""
        self._kept[trace] = None
        if len(self._kept) > MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        held = self._held.pop(trace, [])
        self._count -= len(held)
        for span in held:
            self._export(span)

    def _export(self, span: ReadableSpan) -> None:
        sampled = _sampled(span)
        for destination in self._destinations:
            destination.on_end(sampled)


def _duration(span: ReadableSpan) -> int:
    """Returns the duration of a span in nanoseconds."""
    return (span.end_time or 0) - (span.start_time or 0)


def _sampled(span: ReadableSpan) -> ReadableSpan:
    """Returns a copy that exporters take."""
    context = span.context
    flags = TraceFlags(context.trace_flags | TraceFlags.SAMPLED)
    return ReadableSpan(
        name=span.name,
        context=SpanContext(context.trace_id, context.span_id, context.is_remote, flags, context.trace_state),
        parent=span.parent,
        resource=span.resource,
        attributes=span.attributes,
        events=span.events,
        links=span.links,
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )
