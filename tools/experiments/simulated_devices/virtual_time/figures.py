"""The figures of a simulated run, as the tables show them."""

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from tools.experiments.simulated_devices.virtual_time.pipeline import Trace
from tools.experiments.simulated_devices.virtual_time.service_level import makespan

QUANTILES = {"median": 50, "p90": 90, "p95": 95, "p99": 99}


def figures(trace: Trace) -> dict[str, float]:
    """Returns the figures of one run. Times are in seconds, shares in [0, 1]."""
    requests = trace.requests
    span = makespan(requests)
    times = {
        "ttft": [request.ttft for request in requests],
        "tpot": [statistics.fmean(request.intervals) for request in requests if request.intervals],
        "itl": [interval for request in requests for interval in request.intervals],
    }
    results = {
        "requests_per_s": len(requests) / span,
        "tokens_per_s": sum(request.output for request in requests) / span,
        "busy": trace.busy / trace.working,
        "waste": statistics.fmean(trace.waste.samples),
        "waste_running": statistics.fmean(trace.waste.running),
        "waste_queued": statistics.fmean(trace.waste.queued),
        "preemptions": float(trace.preemptions),
        "row_steps": float(trace.rows),
    }
    for name, values in times.items():
        results |= {f"{name}_{key}": float(np.percentile(values, q)) for key, q in QUANTILES.items() if values}
    return results


def mean(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns each figure's mean over the runs, one per seed."""
    return {name: statistics.fmean(run[name] for run in runs) for name in runs[0]}
