"""Reports of metrics in the text format of Prometheus."""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from typing_extensions import override

from pagewire.shared.messages.metrics import MetricsReport
from pagewire.shared.metrics.metric import Kind, Metric, Sample
from pagewire.shared.metrics.table import METRICS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the page."""
OWN_LABELS = ("service_name", "service_instance_id", "model")
"""Labels of every series. Prometheus makes the first two from OpenTelemetry's attributes of a resource."""


def page(reports: Iterable[MetricsReport], *collectors: Collector) -> bytes:
    """Returns the text of `/metrics`: all metrics of the reports, and the families of further collectors."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in (Reports(list(reports)), *collectors):
        registry.register(collector)
    return generate_latest(registry)


class Reports(Collector):
    """The metrics of `METRICS`. Samples of another release that have other names, labels or buckets are left out."""

    def __init__(self, reports: Sequence[MetricsReport]) -> None:
        self._reports = reports

    def describe(self) -> Iterator[Family]:
        """Returns nothing: the families are known with the values."""
        return iter(())

    @override
    def collect(self) -> Iterator[Family]:
        samples: dict[str, list[tuple[MetricsReport, Sample]]] = {}
        for report in self._reports:
            for sample in report.samples:
                samples.setdefault(sample.name, []).append((report, sample))
        for name, metric in METRICS.items():
            if name in samples:
                series = [
                    ([f"pagewire-{report.service}", report.instance, report.model, *sample.labels], sample)
                    for report, sample in samples[name]
                    if fits(metric, sample)
                ]
                yield family(metric.prometheus_name, metric, (*OWN_LABELS, *metric.labels), series)


def fits(metric: Metric, sample: Sample) -> bool:
    """Returns whether a sample has the labels and the buckets that its metric is declared with here."""
    counts = len(metric.buckets) + 1 if metric.kind is Kind.HISTOGRAM else 0
    return len(sample.labels) == len(metric.labels) and len(sample.counts) == counts


def family(name: str, metric: Metric, labels: Sequence[str], series: Iterable[tuple[list[str], Sample]]) -> Family:
    """Returns the series of one metric under a name. Each has the values of `labels`."""
    match metric.kind:
        case Kind.COUNTER:
            counters = CounterMetricFamily(name, metric.help, labels=labels)
            for values, sample in series:
                counters.add_metric(values, sample.value)
            return counters
        case Kind.GAUGE:
            gauges = GaugeMetricFamily(name, metric.help, labels=labels)
            for values, sample in series:
                gauges.add_metric(values, sample.value)
            return gauges
        case Kind.HISTOGRAM:
            histograms = HistogramMetricFamily(name, metric.help, labels=labels)
            for values, sample in series:
                histograms.add_metric(values, _buckets(metric, sample), sample.value)
            return histograms


def _buckets(metric: Metric, sample: Sample) -> list[tuple[str, float]]:
    """Returns the counts up to each bound."""
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*map(float, metric.buckets), float("inf")), sample.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), total))
    return buckets
