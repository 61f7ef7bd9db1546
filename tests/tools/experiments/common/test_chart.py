import xml.etree.ElementTree as ET

from tools.experiments._common.chart import chart

SVG = "{http://www.w3.org/2000/svg}"


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


def test_higher_values_are_further_up() -> None:
    picture = ET.fromstring(chart("", "", "", {"": [(1, 10), (2, 20)]}))
    line = picture.find(f"{SVG}polyline")
    assert line is not None
    (x1, y1), (x2, y2) = ((float(v) for v in point.split(",")) for point in line.attrib["points"].split())
    assert x1 < x2
    assert y1 > y2
