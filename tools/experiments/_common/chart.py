"""Draws lines as a picture in SVG."""

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

Points = Sequence[tuple[float, float]]
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _LEGEND = 640, 360, 64, 34, 48, 150
_COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8e5ea2", "#e09f3e", "#555555")


def chart(title: str, x_label: str, y_label: str, lines: Mapping[str, Points]) -> str:
    """Returns an SVG picture of lines through points. Both axes begin at 0."""
    right, top = _ceiling(lines, 0), _ceiling(lines, 1)
    width, height = _WIDTH - _LEFT - _LEGEND, _HEIGHT - _TOP - _BOTTOM

    def place(point: tuple[float, float]) -> str:
        return f"{_LEFT + point[0] / right * width:.1f},{_TOP + (1 - point[1] / top) * height:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="11"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-size="13">{escape(title)}</text>',
        f'<text x="{_LEFT + width / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(14 {_TOP + height / 2}) rotate(-90)" text-anchor="middle">',
        f"{escape(y_label)}</text>",
    ]
    for i in range(5):
        x, y = place((right * i / 4, top * i / 4)).split(",")
        parts.append(f'<path d="M{_LEFT},{y}h{width}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{top * i / 4:.3g}</text>')
        parts.append(f'<text x="{x}" y="{_TOP + height + 16}" text-anchor="middle">{right * i / 4:.3g}</text>')
    for i, (name, points) in enumerate(lines.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        joined = " ".join(place(point) for point in points)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        column, row = _WIDTH - _LEGEND + 10, _TOP + 14 + 18 * i
        parts.append(f'<path d="M{column},{row - 4}h16" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{column + 22}" y="{row}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _ceiling(lines: Mapping[str, Points], axis: int) -> float:
    """Returns a round number that no point exceeds."""
    most = max(point[axis] for points in lines.values() for point in points) or 1.0
    unit = 10.0 ** np.floor(np.log10(most))
    return float(next(unit * step for step in (1, 2, 4, 6, 8, 10) if unit * step >= most))
