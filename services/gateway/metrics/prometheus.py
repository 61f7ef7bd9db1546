"""Reports as Prometheus reads them."""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from pagewire.shared.messages.metrics import MetricsReport
from pagewire.shared.metrics.metric import Kind, Metric, Sample
from pagewire.shared.metrics.table import METRICS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OWN_LABELS = ("service_name", "service_instance_id", "model")
"""Labels of every series. The first two are what Prometheus makes of OpenTelemetry's attributes of a resource."""


def page(reports: Iterable[MetricsReport], *collectors: Collector) -> bytes:
    """Returns the text of `/metrics`: all metrics of the reports, and what further collectors make of them."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in (Reports(list(reports)), *collectors):
        registry.register(collector)
    return generate_latest(registry)


class Reports(Collector):
    """The metrics of `METRICS`. A report of another release may have others, or other buckets: those are left out."""

    def __init__(self, reports: Sequence[MetricsReport]) -> None:
        self._reports = reports

    def describe(self) -> Iterator[Family]:
        """Says nothing before there are values."""
        return iter(())

    def collect(self) -> Iterator[Family]:
        """Yields a family for each metric that has values."""
        found: dict[str, list[tuple[MetricsReport, Sample]]] = {}
        for report in self._reports:
            for sample in report.samples:
                found.setdefault(sample.name, []).append((report, sample))
        for name, metric in METRICS.items():
            if name in found:
                series = [
                    ([f"pagewire-{report.service}", report.instance, report.model, *sample.labels], sample)
                    for report, sample in found[name]
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
