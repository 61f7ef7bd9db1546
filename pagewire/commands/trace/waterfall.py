"""Draws the spans of one request as a waterfall in the terminal, and lists slow requests."""

from collections.abc import Iterable, Sequence

from pagewire.shared import subjects
from pagewire.shared.telemetry.span_files import Span

STAGES = ("receive", "queue", "admit", "prefill", "decode", "preempted", "recover", "stream")
"""Names of the spans of a request's stages, in the order in which they begin."""


def slowest(spans: Iterable[Span], count: int) -> list[list[Span]]:
    """Returns the spans of the `count` traces that took longest, longest first."""
    traces: dict[str, list[Span]] = {}
    for span in spans:
        traces.setdefault(span.trace_id, []).append(span)
    return sorted(traces.values(), key=duration, reverse=True)[:count]


def duration(spans: Sequence[Span]) -> float:
    """Returns the seconds from the first start to the last end."""
    return max(span.end for span in spans) - min(span.start for span in spans)


def table(traces: Iterable[Sequence[Span]]) -> list[str]:
    """Returns one line per request: its id, its milliseconds, and the milliseconds of each stage."""
    lines = [f"{'request':<32}{'ms':>10}" + "".join(f"{stage:>10}" for stage in STAGES)]
    for spans in traces:
        names = (str(span.attributes["request_id"]) for span in spans if "request_id" in span.attributes)
        name = subjects.owner_and_text(next(names, ""))[1]
        stages = "".join(f"{seconds * 1000:>10.1f}" for seconds, _ in shares(spans).values())
        lines.append(f"{name:<32}{duration(spans) * 1000:>10.1f}{stages}")
    return lines


def draw(spans: Sequence[Span], width: int = 60) -> list[str]:
    """Returns one line per span: stage, service, start and duration in milliseconds, and a bar on a common scale.

    The spans of single steps are left out.
    """
    spans = [span for span in spans if span.name != "step"]
    column = max(len(span.name) for span in spans) + 2
    begin = min(span.start for span in spans)
    whole = duration(spans)
    scale = width / whole if whole > 0 else 0.0
    lines = [f"{'stage':<{column}}{'service':<14}{'start ms':>10}{'ms':>10}"]
    for span in spans:
        left = min(int((span.start - begin) * scale), width - 1)
        length = max(1, min(round((span.end - span.start) * scale), width - left))
        bar = " " * left + "█" * length
        start, milliseconds = (span.start - begin) * 1000, (span.end - span.start) * 1000
        lines.append(f"{span.name:<{column}}{span.service:<14}{start:>10.1f}{milliseconds:>10.1f}  {bar}")
    return lines


def shares(spans: Sequence[Span]) -> dict[str, tuple[float, float]]:
    """Returns each stage's seconds and its share of the time from the first start to the last end."""
    whole = duration(spans)
    seconds = {stage: sum(span.end - span.start for span in spans if span.name == stage) for stage in STAGES}
    return {stage: (time, time / whole if whole else 0.0) for stage, time in seconds.items()}
