"""The loads of `vllm_gpu`: what each stage sends, how client processes send it, and what comes of it."""

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from typing import NamedTuple

from pagewire.bench._common.loads import sharegpt_lengths
from tools.experiments.vllm.client import Planned, Record, send_all
from tools.experiments.vllm.inputs import words

CLIENTS = 4
"""Processes that send and read, so that no client is the bottleneck."""
SPREAD = 0.3
"""Deviation of lengths by their mean, as DeepSpeed-FastGen draws them."""
LONGEST = 4000
"""Longest prompt with drawn lengths, in tokens."""


class Stage(NamedTuple):
    """One load."""

    title: str
    lengths: tuple[int, int, float] | None
    """Tokens of prompt and answer and the deviation by the mean; None: those of ShareGPT."""
    requests: int
    rate: float | None = None
    """Requests per second as a Poisson process; None: as soon as a client is free."""
    clients: int | None = None
    """Requests at a time; None: all."""


STAGES: Mapping[str, Stage] = {
    "burst": Stage("ShareGPT, all at once", None, 500),
    "rate32": Stage("ShareGPT, 32 requests/s (Poisson)", None, 500, rate=32.0),
    "single": Stage("200 in / 256 out, 1 client", (200, 256, 0.0), 8, clients=1),
    "fastgen16": Stage("2600 in / 60 out, 16 clients", (2600, 60, SPREAD), 96, clients=16),
    "fastgen64": Stage("2600 in / 60 out, 64 clients", (2600, 60, SPREAD), 288, clients=64),
}
"""The measured loads, by name."""
WARM_UP = Stage("warm-up", None, 64)


def planned(name: str, stage: Stage, scale: float = 1.0) -> list[Planned]:
    """Returns the requests of a stage, the same ones for both sides; `scale` below 1 makes fewer."""
    draw = random.Random(f"versus {name}")
    count = max(int(stage.requests * scale), 4, stage.clients or 0)
    if stage.lengths is None:
        lengths = draw.choices(sharegpt_lengths(), k=count)
    else:
        prompt, output, spread = stage.lengths
        lengths = [
            (
                max(16, min(LONGEST, int(draw.gauss(prompt, spread * prompt)))),
                max(1, int(draw.gauss(output, spread * output))),
            )
            for _ in range(count)
        ]
    vocabulary = words()
    weights = [1 / rank for rank in range(1, len(vocabulary) + 1)]  # frequent ones first, as in prose
    at, requests = 0.0, []
    for tokens, output in lengths:
        requests.append(Planned("".join(draw.choices(vocabulary, weights, k=tokens)), output, at))
        at += draw.expovariate(stage.rate) if stage.rate else 0.0
    return requests


def run(url: str, name: str, stage: Stage, scale: float, limit: float) -> list[Record]:
    """Sends a stage from `CLIENTS` processes and returns all records; after `limit` seconds requests are late."""
    requests = planned(name, stage, scale)
    parts = min(CLIENTS, stage.clients or CLIENTS, len(requests))
    start = time.monotonic() + 1.0 + 0.2 * parts  # when all have imported what they need
    with ProcessPoolExecutor(parts, get_context("spawn")) as pool:
        running = [
            pool.submit(send_all, url, requests[part::parts], _share(stage.clients, parts, part), start, limit)
            for part in range(parts)
        ]
        return [record for client in running for record in client.result()]


def figures(records: Sequence[Record]) -> dict[str, float | list[str]]:
    """Returns the figures of the answered requests by the definitions of `vllm bench serve`, in milliseconds."""
    good = [record for record in records if not record.error]
    errors = sorted({record.error for record in records if record.error})[:3]
    result: dict[str, float | list[str]] = {"requests": len(records), "answered": len(good), "errors": errors}
    if not good:
        return result
    seconds = max(record.chunks[-1] for record in good) - min(record.sent for record in good)
    ttft = [1e3 * (record.chunks[0] - record.sent) for record in good]
    tpot = [
        1e3 * (record.chunks[-1] - record.chunks[0]) / (record.tokens - 1) for record in good if record.tokens > 1
    ] or [0.0]
    itl = [1e3 * (later - earlier) for record in good for earlier, later in pairwise(record.chunks)] or [0.0]
    tokens = sum(record.tokens for record in good)
    return result | {
        "seconds": seconds,
        "output_tokens": tokens,
        "prompt_tokens": sum(record.prompt_tokens for record in good),
        "output_per_s": tokens / seconds,
        "tokens_per_chunk": tokens / sum(len(record.chunks) for record in good),
        "ttft_median": statistics.median(ttft),
        "ttft_p99": quantile(ttft, 0.99),
        "tpot_median": statistics.median(tpot),
        "itl_p95": quantile(itl, 0.95),
        "itl_p99": quantile(itl, 0.99),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Returns a quantile, interpolated between neighbours.

    >>> quantile([4.0, 1.0, 2.0], 0.75)
    3.0
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (place - low)


def _share(clients: int | None, parts: int, part: int) -> int | None:
    return None if clients is None else clients // parts + (part < clients % parts)
