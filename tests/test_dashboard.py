"""Every query of the dashboard in `deploy/` asks for series that the services have."""

import json
import re
from pathlib import Path

import pytest
import yaml

from pagewire.shared.metrics.metric import Kind, Metric
from pagewire.shared.metrics.table import METRICS

DEPLOY = Path(__file__).parents[1] / "deploy"
PANELS = json.loads((DEPLOY / "dashboard.json").read_text())["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel.get("targets", [])]
OWN_LABELS = {"service_name", "service_instance_id", "model", "le"}


def series() -> dict[str, Metric]:
    """The metric of each series, by the name of the series in Prometheus."""
    suffixes = {Kind.COUNTER: ("_total",), Kind.GAUGE: ("",), Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
    return {metric.prometheus_name + suffix: metric for metric in METRICS.values() for suffix in suffixes[metric.kind]}


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_names_series_and_labels_that_exist(query: str) -> None:
    names = re.findall(r"\b(?:pagewire|gen_ai|process)_\w+", query)
    assert names
    queries = [series()[name] for name in names]
    for labels in re.findall(r"by \(([^)]*)\)", query):
        assert set(labels.split(", ")) <= OWN_LABELS.union(*(metric.labels for metric in queries))
    for name in names:
        counted = series()[name].kind is not Kind.GAUGE
        assert counted == bool(re.search(rf"(rate|increase)\({name}\[", query)), "only what grows has a rate"


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in PANELS)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_prometheus_scrapes_the_page_of_the_gateway() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
