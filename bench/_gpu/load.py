"""Sends ShareGPT lengths as a Poisson process through the whole pipeline.

The arrival rate is the rate at which the pipeline serves the same requests when all arrive at once: it is then full
nearly all the time, without a queue that only grows. The device itself counts its busy time.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagewire import AsyncClient, SamplingParams
from pagewire.bench._common.loads import Request, poisson, sharegpt
from pagewire.bench._common.output import markdown
from pagewire.bench._common.stack import counters, difference
from pagewire.bench._gpu.machine import release
from pagewire.bench._gpu.plan import load_bytes, working_seconds
from pagewire.bench.shapes import write_folder
from pagewire.embedded.programs import PIPELINE
from pagewire.embedded.stack import Stack
from pagewire.services.executor.devices.sim.roofline import shape_of
from pagewire.shared.settings.config import Settings

CONTEXT = 2048
"""Tokens of a sequence; the longest conversation of the data is shorter."""
BUDGET = 1024
"""Tokens per step."""
DEADLINE = 540.0
"""Seconds within which every request must end."""


@dataclass
class LoadRun:
    """One engine under one load. Times are in seconds."""

    engine: str
    model: str
    streams: int
    qps: float
    requests: int
    requests_per_s: float
    tokens_per_s: float
    ttft_median: float
    ttft_p99: float
    itl_median: float
    itl_p99: float
    busy: float = 0.0
    """Share of the time with work in which the device computed."""
    rows_per_step: float = 0.0
    bandwidth_share: float = 0.0
    """Share of the copy bandwidth: bytes that are moved at least, per second of the busy time."""


def figures(engine: str, model: str, streams: int, qps: float, served: Sequence[Request]) -> LoadRun:
    """Returns the figures that the clients saw. Every request has at least one token."""
    span = max(request.tokens_at[-1] for request in served) - min(request.at for request in served)
    first = [request.ttft for request in served]
    between = [interval for request in served for interval in request.intervals] or [0.0]
    rates = (len(served) / span, sum(len(request.tokens_at) for request in served) / span)
    ttft = (statistics.median(first), float(np.percentile(first, 99)))
    itl = (statistics.median(between), float(np.percentile(between, 99)))
    return LoadRun(engine, model, streams, qps, len(served), *rates, *ttft, *itl)


def load(
    models: dict[str, dict[str, Any]],
    streams: Sequence[int],
    count: int,
    bandwidth: float,
    device: torch.device,
) -> Iterator[LoadRun]:
    """Measures the pipeline with `count` requests for each number of streams."""
    for name, config in models.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / name
            write_folder(name, folder)
            for slots in streams:
                release(device)  # what this process keeps, the executor cannot have
                yield asyncio.run(_serve(name, config, folder, slots, count, bandwidth, device.type))


async def _serve(
    name: str, config: dict[str, Any], folder: Path, streams: int, count: int, bandwidth: float, device: str
) -> LoadRun:
    settings = Settings(
        model=str(folder),
        device=device,
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=CONTEXT,
        max_num_seqs=streams,
        max_num_batched_tokens=BUDGET,
        nats_port=0,
        log_level="warning",
    )
    async with Stack(settings, PIPELINE) as stack:
        address = await stack.ready()
        async with AsyncClient(address.nats) as client:
            at_once = await _offer(client, poisson(sharegpt, float("inf"), count, seed=1))
            qps = figures("", name, streams, 0.0, at_once).requests_per_s
            (before,) = await counters(address.nats)
            served = await _offer(client, poisson(sharegpt, qps, count, seed=0))
            (after,) = await counters(address.nats)
    spent = difference(after, before)
    run = figures("pagewire", name, streams, qps, served)
    run.busy = spent["busy_s"] / working_seconds([(request.at, request.tokens_at[-1]) for request in served])
    run.rows_per_step = spent["rows"] / spent["steps"]
    lengths = [(len(request.prompt), request.output) for request in served]
    moved = load_bytes(shape_of(config), int(spent["steps"]), lengths, itemsize=2)
    run.bandwidth_share = moved / spent["busy_s"] / bandwidth
    return run


async def _offer(client: AsyncClient, requests: list[Request]) -> list[Request]:
    """Sends every request at its time and fills in when its tokens came."""
    began = time.perf_counter()

    async def one(request: Request) -> None:
        await asyncio.sleep(began + request.at - time.perf_counter())
        sampling = SamplingParams(max_tokens=request.output, ignore_eos=True, temperature=0.0)
        async for deltas in client.stream(request.prompt, sampling, timeout=DEADLINE).batches():
            request.tokens_at += [time.perf_counter() - began] * sum(len(delta.token_ids) for delta in deltas)

    async with asyncio.TaskGroup() as tasks:
        for request in requests:
            tasks.create_task(one(request))
    return requests


def table(runs: Sequence[LoadRun]) -> list[str]:
    """Returns a line per engine and load, in Markdown."""
    return markdown(
        "engine | model | streams | offered/s | requests/s | tokens/s | TTFT ms median / P99 | ITL ms median / P99"
        " | busy | rows/step | of the copy bandwidth",
        (
            f"{run.engine} | {run.model} | {run.streams} | {run.qps:.2f} | {run.requests_per_s:.2f}"
            f" | {run.tokens_per_s:.0f} | {run.ttft_median * 1e3:.0f} / {run.ttft_p99 * 1e3:.0f}"
            f" | {run.itl_median * 1e3:.1f} / {run.itl_p99 * 1e3:.1f} | {run.busy:.1%}"
            f" | {run.rows_per_step:.1f} | {run.bandwidth_share:.1%}"
            for run in runs
        ),
    )
