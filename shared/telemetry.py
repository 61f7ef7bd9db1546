"""Traces of requests with OpenTelemetry. Tracing is off, and costs next to nothing, until a destination is configured.

Spans go to a collector when one of the standard variables OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_TRACES_EXPORTER=otlp is set, and to files when the setting `trace_dir` is.
"""

import atexit
import os
from collections.abc import Callable, Mapping, MutableMapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from pagewire.shared.config import Settings

_NANOSECONDS = 1_000_000_000
_propagator = TraceContextTextMapPropagator()
_tracer: Tracer = trace.NoOpTracer()
_on = False
_dropped: list[Callable[[], int]] = []


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

    from pagewire.shared.spans import CountedSpans, SpanFile

    resource = Resource.create({"service.name": f"pagewire-{service}", "service.instance.id": instance})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    if settings.trace_dir:
        to_file = CountedSpans(SpanFile(settings.trace_dir, service, instance), schedule_delay_millis=200)
        provider.add_span_processor(to_file)
        _dropped.append(to_file.dropped)
    if to_collector:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        sent = CountedSpans(OTLPSpanExporter())
        provider.add_span_processor(sent)
        _dropped.append(sent.dropped)
    atexit.register(provider.shutdown)
    _tracer, _on = provider.get_tracer("pagewire"), True


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


def span(name: str, parent: str, start: float, end: float, attributes: dict[str, AttributeValue] | None = None) -> None:
    """Records a finished span; no effect while tracing is off or without a parent.

    `parent` is the traceparent of the parent span, `start` and `end` are Unix times in seconds.
    """
    if not _on or not parent:
        return
    finished = _tracer.start_span(
        name,
        context=_propagator.extract({"traceparent": parent}),
        attributes=attributes,
        start_time=int(start * _NANOSECONDS),
    )
    finished.end(int(end * _NANOSECONDS))


def wants_collector(kind: str) -> bool:
    """Returns whether the environment names a collector of TRACES or METRICS."""
    exporters = os.environ.get(f"OTEL_{kind}_EXPORTER", "")
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporters == "none":
        return False
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{kind}_ENDPOINT")
    return "otlp" in exporters or any(os.environ.get(name) for name in endpoints)
