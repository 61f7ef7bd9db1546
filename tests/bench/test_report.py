"""Figures, tables and charts."""

import xml.etree.ElementTree as ET

import pytest

from pagewire.bench._report import chart, figures, markdown, mean, milliseconds
from tests.bench.simulation.cases import request, serve

SVG = "{http://www.w3.org/2000/svg}"


def test_figures_of_a_run() -> None:
    found = figures(serve(request(0.0, 100, 4), request(1.0, 100, 4, first=500)))
    span = 1.0 + 41.03e-3
    assert found["requests_per_s"] == pytest.approx(2 / span)
    assert found["tokens_per_s"] == pytest.approx(8 / span)
    assert found["busy"] == pytest.approx(1.0)
    assert [found["ttft_median"], found["ttft_p99"]] == pytest.approx([11e-3] * 2)
    assert [found["tpot_p90"], found["itl_p95"]] == pytest.approx([10.01e-3] * 2)
    assert 0 < found["waste"] < 1
    assert found["reserved"] == found["preemptions"] == 0.0
    assert found["row_steps"] == 8


def test_a_request_of_one_token_has_no_time_per_token() -> None:
    found = figures(serve(request(0.0, 100, 1)))
    assert "ttft_median" in found
    assert "itl_median" not in found


def test_mean_over_seeds() -> None:
    assert mean([{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 2.0}]) == {"a": 2.0, "b": 2.0}


def test_times_are_shown_in_milliseconds() -> None:
    cell = {"itl_median": 0.0123, "itl_p90": 0.5, "itl_p95": 1.0, "itl_p99": 0.00001}
    assert milliseconds(cell, "itl") == "12.3 / 500 / 1000 / 0.01"


def test_a_table() -> None:
    assert markdown(["name", "x"], [["a", "1"]]) == ["| name | x |", "| --- | ---: |", "| a | 1 |"]


def test_a_chart_is_a_picture_with_every_line_inside_it() -> None:
    picture = ET.fromstring(chart("a < b & c", "x", "y", {"one": [(0, 0), (7, 33)], "two": [(3, 12)]}))
    lines = [line.attrib["points"].split() for line in picture.iter(f"{SVG}polyline")]
    assert [len(points) for points in lines] == [2, 1]
    for points in lines:
        for x, y in (map(float, point.split(",")) for point in points):
            assert 0 <= x <= 640
            assert 0 <= y <= 360
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert {"a < b & c", "x", "y", "one", "two", "8", "40"} <= {text.strip() for text in texts if text}


def test_higher_is_further_up() -> None:
    picture = ET.fromstring(chart("", "", "", {"": [(1, 10), (2, 20)]}))
    line = picture.find(f"{SVG}polyline")
    assert line is not None
    (x1, y1), (x2, y2) = ((float(v) for v in point.split(",")) for point in line.attrib["points"].split())
    assert x1 < x2
    assert y1 > y2
