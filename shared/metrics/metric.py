"""Metrics: their declarations, and the values that a service counts.

A service counts in plain numbers, without a lock, and hands them over when the gateway collects them.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import msgspec

_PROMETHEUS_UNITS = {"s": "seconds", "By": "bytes", "1": "ratio"}


class Kind(StrEnum):
    """How the value of a metric changes."""

    COUNTER = "counter"
    """It only grows; a new process begins at 0."""
    GAUGE = "gauge"
    """It goes up and down."""
    HISTOGRAM = "histogram"
    """Values are counted in buckets."""


@dataclass(frozen=True, slots=True)
class Metric:
    """The declaration of a metric. All are in `pagewire.shared.metrics.table`."""

    name: str
    """Name in OpenTelemetry, with dots."""
    kind: Kind
    unit: str
    """UCUM code as in OpenTelemetry: s, By, 1 for a share, {name} for things that are counted; empty: a yes or no."""
    help: str
    services: tuple[str, ...]
    """The services that report it."""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without infinity."""

    @property
    def prometheus_name(self) -> str:
        """The name in Prometheus, without the `_total` of a counter."""
        name, unit = self.name.replace(".", "_"), _PROMETHEUS_UNITS.get(self.unit)
        return f"{name}_{unit}" if unit else name

    def sample(self, value: "float | Histogram", *labels: str) -> "Sample":
        """Returns a value with the values of the labels, in the order of their declaration."""
        if len(labels) != len(self.labels):
            raise ValueError(f"{self.name} has the labels {self.labels}, not {labels}")
        if isinstance(value, Histogram):
            return Sample(self.name, value.sum, labels, list(value.counts))
        return Sample(self.name, value, labels)

    def samples(self, values: "Iterable[tuple[str, float | Histogram]]") -> "Iterator[Sample]":
        """Yields a sample for each pair of the only label and its value."""
        for label, value in values:
            yield self.sample(value, label)


class Sample(msgspec.Struct, array_like=True, frozen=True):
    """The value of a metric in one process for one set of labels."""

    name: str
    value: float
    """The value; of a histogram, the sum of its observations."""
    labels: tuple[str, ...] = ()
    counts: list[int] = []
    """Observations per bucket of a histogram, the last one without a bound; else empty."""


class Histogram:
    """Observations of one metric, in plain integers. One thread may write while others read.

    Attributes:
        counts: observations per bucket, the last one without a bound.
        sum: sum of the observations.
    """

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, metric: Metric) -> None:
        self._bounds = metric.buckets
        self.counts = [0] * (len(metric.buckets) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts `value` `times` times."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times
