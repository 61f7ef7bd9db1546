"""The stages of one request: its spans, where they are written to files, else the times that its last frame has."""

from pathlib import Path
from typing import Any

from pagewire.services.gateway.routes.request_log import NATS, LoggedRequest
from pagewire.shared.telemetry import span_files

LATEST = 8 << 20
"""Bytes at the end of each file of spans that are searched."""


def traced(folder: Path, request_id: str, tenant: str | None) -> list[dict[str, Any]]:
    """Returns the spans of a request, as `pagewire trace` draws them. Reads files.

    Args:
        folder: the folder of `--trace-dir`.
        request_id: id of the request, as its client knows it.
        tenant: owner of the request; None: anybody.
    """
    spans = span_files.of_request(span_files.read(folder, LATEST), request_id, tenant)
    return [_stage(span.name, span.service, span.start, span.end) for span in spans if span.name != "step"]


def measured(request: LoggedRequest) -> list[dict[str, Any]]:
    """Returns the stages of a request that has ended well, and otherwise its whole time alone."""
    sender = "client" if request.path == NATS else "gateway"
    stages = [_stage("request", sender, request.began, request.ended)]
    metrics = request.metrics
    if metrics is None:
        return stages
    accepted = at = request.ended - metrics.e2e_latency
    stages.append(_stage("receive", "tokenizer", request.began, max(request.began, accepted)))
    times = (
        ("queue", "scheduler", metrics.queued_time),
        ("prefill", "executor", metrics.prefill_time),
        ("decode", "executor", metrics.decode_time),
    )
    for name, service, seconds in times:
        if seconds is not None:
            stages.append(_stage(name, service, at, at + seconds))
            at += seconds
    return stages


def _stage(name: str, service: str, start: float, end: float) -> dict[str, Any]:
    return {"name": name, "service": service, "start": start, "end": end}
