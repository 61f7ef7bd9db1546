"""Traces of requests with OpenTelemetry. Tracing is off, and costs next to nothing, until a destination is configured.

Spans go to a collector when one of the standard variables OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_TRACES_EXPORTER=otlp is set, and to files when the setting `trace_dir` is.
OTEL_TRACES_SAMPLER decides which requests are traced; with the setting `trace_slow`, slow and failed ones are, too.
"""

import atexit
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from pagewire.shared import subjects
from pagewire.shared.bus import Bus, Message
from pagewire.shared.errors import BusError, PagewireError, RequestError
from pagewire.shared.settings.config import Settings, seconds

if TYPE_CHECKING:  # slow to import
    from pagewire.shared.telemetry.tail_sampling import TailBuffer

PROVIDER = "pagewire"
"""Value of the attribute `gen_ai.provider.name`."""

_NANOSECONDS = 1_000_000_000
_propagator = TraceContextTextMapPropagator()
_tracer: Tracer = trace.NoOpTracer()
_on = False
_dropped: list[Callable[[], int]] = []
_tails: "list[TailBuffer]" = []
"""The buffer of spans of requests that are not sampled; empty without the setting `trace_slow`."""


def configure(service: str, instance: str, settings: Settings) -> None:
    """Turns tracing on for this process if a setting or the environment asks for it.

    Raises:
        ConfigurationError: the setting `trace_dir` names a folder that cannot be written to.
    """
    global _tracer, _on
    to_collector = wants_collector("TRACES")
    if not (settings.trace_dir or to_collector):
        return
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    from pagewire.shared.telemetry.span_files import CountedSpans, SpanFile

    resource = Resource.create({"service.name": f"pagewire-{service}", "service.instance.id": instance})
    destinations: list[CountedSpans] = []
    if settings.trace_dir:
        destinations.append(CountedSpans(SpanFile(settings.trace_dir, service, instance), schedule_delay_millis=200))
    if to_collector:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        destinations.append(CountedSpans(OTLPSpanExporter()))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for destination in destinations:
        provider.add_span_processor(destination)
        _dropped.append(destination.dropped)
    if settings.trace_slow:
        from pagewire.shared.telemetry.tail_sampling import RecordAll, TailBuffer

        tail = TailBuffer(destinations, seconds(settings.trace_slow))
        provider.add_span_processor(tail)
        _tails.append(tail)
        provider.sampler = RecordAll(provider.sampler)
    atexit.register(provider.shutdown)
    _tracer, _on = provider.get_tracer("pagewire"), True


async def listen(bus: Bus) -> None:
    """Exchanges with other processes, from now on, which slow and failed requests are kept."""
    if not _tails:
        return
    (tail,) = _tails

    def announce(kept: int) -> None:
        with suppress(BusError):  # without a connection, only what this process holds is kept
            bus.publish(subjects.TRACES, trace.format_trace_id(kept).encode())

    def on_kept(message: Message) -> None:
        with suppress(ValueError):
            tail.keep(int(message.data, 16))

    tail.announce = announce
    await bus.subscribe(subjects.TRACES, on_kept)


def tracer() -> Tracer:
    """Returns the tracer; while tracing is off it has no effect."""
    return _tracer


def dropped_spans() -> int:
    """Returns how many spans have not reached their destination."""
    return sum(count() for count in _dropped)


def extract(headers: Mapping[str, str]) -> Context | None:
    """Reads the caller's trace context from the header `traceparent`; None without one or while tracing is off."""
    if not _on or "traceparent" not in headers:
        return None
    return _propagator.extract(headers)


def inject(headers: MutableMapping[str, str], span: trace.Span) -> None:
    """Sets the header `traceparent` for work that continues `span`; no effect while tracing is off."""
    if value := traceparent(span):
        headers["traceparent"] = value


def traceparent(span: trace.Span) -> str:
    """Returns the span's context as a W3C traceparent; empty while tracing is off."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    trace_id, span_id = trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)
    return f"00-{trace_id}-{span_id}-{context.trace_flags:02x}"


def trace_id(parent: str) -> str:
    """Returns the id of the trace that a traceparent names; empty if it names none."""
    return parent.split("-")[1] if parent.count("-") == 3 else ""


def records(parent: str) -> bool:
    """Returns whether spans that continue a traceparent are recorded: it is sampled, or may still be chosen."""
    return _on and bool(parent) and (bool(_tails) or int(parent[-2:], 16) & 1 == 1)


def span(
    name: str,
    parent: str,
    start: float,
    end: float,
    attributes: dict[str, AttributeValue] | None = None,
    linked: Sequence[str] = (),
) -> None:
    """Records a finished span; no effect while tracing is off or without a parent.

    `parent` is the traceparent of the parent span, `start` and `end` are Unix times in seconds, `linked` are the
    traceparents of further requests that the span is about.
    """
    if not _on or not parent:
        return
    finished = _tracer.start_span(
        name,
        context=_propagator.extract({"traceparent": parent}),
        attributes=attributes,
        start_time=int(start * _NANOSECONDS),
        links=[Link(_span_context(other)) for other in linked],
    )
    finished.end(int(end * _NANOSECONDS))


def begin(name: str, headers: Mapping[str, str], kind: SpanKind = SpanKind.INTERNAL) -> trace.Span:
    """Starts a span that continues the trace of a message; it is not recorded while tracing is off."""
    return _tracer.start_span(name, context=extract(headers), kind=kind)


def fail(span: trace.Span, error: PagewireError) -> None:
    """Records in a span why a request has no answer. The span is an error unless the client must change its request."""
    kind = error.kind if isinstance(error, RequestError) else "internal"
    span.set_attribute("error.type", kind)
    if not isinstance(error, RequestError) or error.code >= 500 or error.retryable:
        span.set_status(Status(StatusCode.ERROR, str(error)))


def wants_collector(kind: str) -> bool:
    """Returns whether the environment names a collector of TRACES or METRICS."""
    exporters = os.environ.get(f"OTEL_{kind}_EXPORTER", "")
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporters == "none":
        return False
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{kind}_ENDPOINT")
    return "otlp" in exporters or any(os.environ.get(name) for name in endpoints)


def _span_context(parent: str) -> trace.SpanContext:
    return trace.get_current_span(_propagator.extract({"traceparent": parent})).get_span_context()
