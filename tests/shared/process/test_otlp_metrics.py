"""A report as a collector receives it."""

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics

from pagewire.shared.messages.metrics import MetricsReport
from pagewire.shared.metrics import table
from pagewire.shared.metrics.metric import Histogram
from pagewire.shared.process.otlp_metrics import metrics_data


def test_a_collector_gets_counters_gauges_and_histograms_of_one_process() -> None:
    durations = Histogram(table.STEP_TIME)
    durations.observe(0.0004)
    durations.observe(0.0041, times=3)
    durations.observe(99.0)
    samples = [
        table.STEP_PHASES.sample(7, "prefill"),
        table.SLOTS.sample(2),
        table.STEP_PHASES.sample(9, "decode"),
        table.STEP_TIME.sample(durations),
    ]
    (resource,) = encode_metrics(metrics_data(MetricsReport("executor", "e1", "tiny", 5.0, samples))).resource_metrics
    attributes = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
    assert attributes["service.name"] == "pagewire-executor"
    assert attributes["service.instance.id"] == "e1"
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    assert set(metrics) == {"pagewire.step.tokens", "pagewire.slots.used", "pagewire.step.duration"}
    phases = metrics["pagewire.step.tokens"].sum
    assert phases.is_monotonic
    assert [point.as_double for point in phases.data_points] == [7, 9]
    assert [pair.value.string_value for pair in phases.data_points[1].attributes] == ["tiny", "decode"]
    assert phases.data_points[0].start_time_unix_nano == 5_000_000_000
    (point,) = metrics["pagewire.step.duration"].histogram.data_points
    assert (point.count, sum(point.bucket_counts), point.bucket_counts[0], point.bucket_counts[-1]) == (5, 5, 1, 1)
    assert not point.HasField("min")
    assert metrics["pagewire.step.duration"].unit == "s"
