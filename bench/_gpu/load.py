"""Sends ShareGPT lengths as a Poisson process through the whole pipeline; if asked for, through transformers too.

The arrival rate is the rate at which the pipeline serves the same requests when all arrive at once: it is then full
nearly all the time, without a queue that only grows. The device itself counts its busy time.
"""

import asyncio
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, Qwen3Config

from pagewire import AsyncClient, SamplingParams
from pagewire.bench._common.loads import Request, poisson, sharegpt
from pagewire.bench._common.output import markdown
from pagewire.bench._common.stack import counters, difference
from pagewire.bench._gpu.machine import release
from pagewire.bench._gpu.plan import load_bytes, working_seconds
from pagewire.embedded.stack import PIPELINE, Stack
from pagewire.services.executor.devices.sim.roofline import shape_of
from pagewire.shared.models.model_folder import BUNDLED
from pagewire.shared.settings.config import Settings

CONTEXT = 2048
"""Tokens of a sequence; the longest conversation of the data is shorter."""
BUDGET = 1024
"""Tokens per step."""
DEADLINE = 540.0
"""Seconds within which every request must end."""
_CONFIGS = {"LlamaForCausalLM": LlamaConfig, "Qwen3ForCausalLM": Qwen3Config}


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
    busy: float | None = None
    """Share of the time with work in which the device computed; None: not known."""
    rows_per_step: float | None = None
    bandwidth_share: float | None = None
    """Moved at least, in the busy time, of the copy bandwidth."""


def figures(engine: str, model: str, streams: int, qps: float, served: Sequence[Request]) -> LoadRun:
    """Returns the figures that the clients saw. Every request has at least one token."""
    span = max(request.tokens_at[-1] for request in served) - min(request.at for request in served)
    first = [request.ttft for request in served]
    between = [interval for request in served for interval in request.intervals] or [0.0]
    rates = (len(served) / span, sum(len(request.tokens_at) for request in served) / span)
    ttft = (statistics.median(first), float(np.percentile(first, 99)))
    itl = (statistics.median(between), float(np.percentile(between, 99)))
    return LoadRun(engine, model, streams, qps, len(served), *rates, *ttft, *itl)


def write_model(config: dict[str, Any], folder: Path, device: torch.device) -> None:
    """Writes a model folder of these sizes with random bf16 weights, and the bundled tokenizer."""
    (architecture,) = config["architectures"]
    end = json.loads((BUNDLED / "config.json").read_text())["eos_token_id"]
    sizes = {name: value for name, value in config.items() if name not in {"architectures", "torch_dtype"}}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            _CONFIGS[architecture](**sizes, eos_token_id=end), dtype=torch.bfloat16
        )
    model.save_pretrained(folder)
    for file in BUNDLED.glob("tokenizer*.json"):
        shutil.copy(file, folder)


def load(
    models: dict[str, dict[str, Any]],
    streams: Sequence[int],
    count: int,
    bandwidth: float,
    device: torch.device,
    *,
    transformers: bool = False,
) -> Iterator[LoadRun]:
    """Measures the pipeline, and perhaps transformers, with `count` requests for each number of streams."""
    for name, config in models.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / name
            write_model(config, folder, device)
            for slots in streams:
                release(device)  # what this process keeps, the executor cannot have
                ours = asyncio.run(_serve(name, config, folder, slots, count, bandwidth, device.type))
                yield ours
                if not transformers:
                    continue
                arrivals = poisson(sharegpt, ours.qps, count, seed=0)
                served = _with_transformers(folder, arrivals, slots, device)
                yield figures("transformers", name, slots, ours.qps, served)


async def _serve(
    name: str, config: dict[str, Any], folder: Path, streams: int, count: int, bandwidth: float, device: str
) -> LoadRun:
    settings = Settings(
        model=str(folder),
        device=device,
        dtype="bfloat16",
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


def _with_transformers(folder: Path, requests: list[Request], streams: int, device: torch.device) -> list[Request]:
    """Serves the same requests by the continuous batching of transformers, and takes its time stamps.

    Raises:
        RuntimeError: transformers has given up, or has not ended in time.
    """
    from transformers import ContinuousBatchingConfig  # not in the oldest versions, which the other parts can do with

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").to(device)
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=CONTEXT)
    batching = ContinuousBatchingConfig(max_requests_per_batch=streams)
    stopped = threading.Event()
    with model.continuous_batching_context_manager(generation, continuous_batching_config=batching) as manager:
        began = time.perf_counter()

        def feed() -> None:
            for index, request in enumerate(requests):
                if stopped.wait(max(began + request.at - time.perf_counter(), 0.0)):
                    return
                options = {"max_new_tokens": request.output, "eos_token_id": -1, "record_timestamps": True}
                manager.add_request(request.prompt, request_id=str(index), **options)

        feeder = threading.Thread(target=feed)
        feeder.start()
        try:
            for left in range(len(requests), 0, -1):
                result = manager.get_result(timeout=max(began + DEADLINE - time.perf_counter(), 0.0))
                if result is None or result.error is not None:
                    why = "no result in time" if result is None else result.error
                    raise RuntimeError(f"transformers: {why}, {left} requests are left")
                requests[int(result.request_id)].tokens_at = [at - began for at in result.timestamps]
        finally:
            stopped.set()
            feeder.join()
    return requests


def table(runs: Sequence[LoadRun]) -> list[str]:
    """Returns a line per engine and load, in Markdown."""

    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.1%}"

    return markdown(
        "engine | model | streams | offered/s | requests/s | tokens/s | TTFT ms median / P99 | ITL ms median / P99"
        " | busy | rows/step | of the copy bandwidth",
        (
            f"{run.engine} | {run.model} | {run.streams} | {run.qps:.2f} | {run.requests_per_s:.2f}"
            f" | {run.tokens_per_s:.0f} | {run.ttft_median * 1e3:.0f} / {run.ttft_p99 * 1e3:.0f}"
            f" | {run.itl_median * 1e3:.1f} / {run.itl_p99 * 1e3:.1f} | {share(run.busy)}"
            f" | {'' if run.rows_per_step is None else f'{run.rows_per_step:.1f}'} | {share(run.bandwidth_share)}"
            for run in runs
        ),
    )
