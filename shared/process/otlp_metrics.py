"""Sends the metrics of this process to an OpenTelemetry collector.

The SDK's instruments lock at every observation and cannot take over finished histograms. So only the SDK's data types
and its exporter are used: reports are translated into these types.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.util.types import Attributes

from pagewire.shared.messages.metrics import MetricsReport
from pagewire.shared.metrics import metric as ours
from pagewire.shared.metrics.table import METRICS

INTERVAL_MS = "60000"
"""Milliseconds between two exports, unless OTEL_METRIC_EXPORT_INTERVAL says otherwise: the SDK's default."""
_NANOSECONDS = 1_000_000_000


async def push(report: Callable[[], MetricsReport], exporter: MetricExporter | None = None) -> None:
    """Sends reports until cancelled. The SDK logs failures."""
    exporter = exporter or OTLPMetricExporter()
    interval = float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", INTERVAL_MS)) / 1000
    try:
        while True:
            await asyncio.sleep(interval)
            await asyncio.to_thread(exporter.export, metrics_data(report()))
    finally:
        exporter.shutdown()


def metrics_data(report: MetricsReport) -> MetricsData:
    """Returns a report as the SDK's exporters take it."""
    resource = Resource.create({"service.name": f"pagewire-{report.service}", "service.instance.id": report.instance})
    span = int(report.started * _NANOSECONDS), time.time_ns()
    by_name = sorted((sample for sample in report.samples if sample.name in METRICS), key=lambda sample: sample.name)
    metrics = [
        _metric(METRICS[name], samples, report.model, span)
        for name, samples in groupby(by_name, lambda sample: sample.name)
    ]
    scope = ScopeMetrics(InstrumentationScope("pagewire"), metrics, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _metric(of: ours.Metric, samples: Iterable[ours.Sample], model: str, span: tuple[int, int]) -> Metric:
    data: Sum | Gauge | Histogram
    match of.kind:
        case ours.Kind.COUNTER:
            data = Sum(list(_points(of, samples, model, span)), AggregationTemporality.CUMULATIVE, is_monotonic=True)
        case ours.Kind.GAUGE:
            data = Gauge(list(_points(of, samples, model, span)))
        case ours.Kind.HISTOGRAM:
            points = [_histogram(of, sample, model, span) for sample in samples]
            data = Histogram(points, AggregationTemporality.CUMULATIVE)
    return Metric(of.name, of.help, of.unit, data)


def _points(
    of: ours.Metric, samples: Iterable[ours.Sample], model: str, span: tuple[int, int]
) -> Iterator[NumberDataPoint]:
    for sample in samples:
        yield NumberDataPoint(_attributes(of, sample, model), *span, float(sample.value))


def _histogram(of: ours.Metric, sample: ours.Sample, model: str, span: tuple[int, int]) -> HistogramDataPoint:
    count, attributes = sum(sample.counts), _attributes(of, sample, model)
    # The least and the largest observation are unknown, and may be left out.
    return HistogramDataPoint(attributes, *span, count, sample.value, sample.counts, of.buckets, None, None)  # type: ignore[arg-type]


def _attributes(of: ours.Metric, sample: ours.Sample, model: str) -> Attributes:
    return {"model": model, **dict(zip(of.labels, sample.labels, strict=True))}
