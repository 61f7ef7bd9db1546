"""The declarations of metrics."""

import re

import pytest

from pagewire.shared.metrics import table
from pagewire.shared.metrics.metric import Histogram, Kind, Metric
from pagewire.shared.metrics.table import METRICS


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_a_declaration_follows_the_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"(pagewire|gen_ai|process)(\.[a-z_]+)+", metric.name)
    assert metric.help
    assert not metric.help.endswith(".")
    assert set(metric.services) <= set(table.SERVICES)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert not metric.prometheus_name.endswith(("_total", "_count", "_sum", "_bucket"))


def test_names_differ_in_prometheus_too() -> None:
    assert len({metric.prometheus_name for metric in METRICS.values()}) == len(METRICS)


def test_short_intervals_fall_into_different_buckets() -> None:
    assert table.INTER_TOKEN.buckets[0] == 0.0005


def test_an_observation_is_in_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    histogram = Histogram(table.LEASE_LEFT)
    for value in (0, 1, 2, 33):
        histogram.observe(value)
    assert histogram.counts[:3] == [2, 1, 0]
    assert histogram.counts[-1] == 1
    assert histogram.sum == 36


def test_a_sample_has_all_labels() -> None:
    with pytest.raises(ValueError, match="priority"):
        table.RUNNING.sample(1.0)
