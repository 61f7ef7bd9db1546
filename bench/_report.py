"""Figures of a run, tables in Markdown, and lines as SVG."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape

import numpy as np

from pagewire.bench._simulation.pipeline import Trace

QUANTILES = {"median": 50, "p90": 90, "p95": 95, "p99": 99}
Points = Sequence[tuple[float, float]]


def figures(trace: Trace) -> dict[str, float]:
    """What the tables show of one run. Times are in seconds, shares in [0, 1]."""
    requests = trace.requests
    span = max(request.tokens_at[-1] for request in requests) - min(request.at for request in requests)
    times = {
        "ttft": [request.ttft for request in requests],
        "tpot": [statistics.fmean(request.intervals) for request in requests if request.intervals],
        "itl": [interval for request in requests for interval in request.intervals],
    }
    found = {
        "requests_per_s": len(requests) / span,
        "tokens_per_s": sum(request.output for request in requests) / span,
        "busy": trace.busy / trace.working,
        "waste": statistics.fmean(trace.waste.samples),
        "reserved": statistics.fmean(trace.waste.reserved),
        "preemptions": float(trace.preemptions),
        "row_steps": float(trace.rows),
    }
    for name, values in times.items():
        found |= {f"{name}_{key}": float(np.percentile(values, q)) for key, q in QUANTILES.items() if values}
    return found


def mean(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each figure's mean over the runs, one per seed."""
    return {name: statistics.fmean(run[name] for run in runs) for name in runs[0]}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table; all but its first column are numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def milliseconds(cell: Mapping[str, float], name: str) -> str:
    """Median, P90, P95 and P99 of a time."""
    return " / ".join(_short(cell[f"{name}_{key}"] * 1e3) for key in QUANTILES)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _LEGEND = 640, 360, 64, 34, 48, 150
_COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8e5ea2", "#e09f3e", "#555555")


def chart(title: str, x_label: str, y_label: str, lines: Mapping[str, Points]) -> str:
    """Lines through points, as an SVG picture. Both axes begin at 0."""
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
    """A round number that no point exceeds."""
    most = max(point[axis] for points in lines.values() for point in points) or 1.0
    unit = 10.0 ** np.floor(np.log10(most))
    return float(next(unit * step for step in (1, 2, 4, 6, 8, 10) if unit * step >= most))
