"""Decode and prefill steps of the real GPU device: their time, and the share of what the machine can do."""

import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from pagewire.bench._common.output import markdown
from pagewire.bench._gpu.machine import GREEDY, Machine, opened
from pagewire.bench._gpu.plan import BLOCK_SIZE, Cell, decode_bytes, fitting, prefill_flops
from pagewire.services.executor.devices.cuda.device import CudaDevice
from pagewire.services.executor.devices.protocol import PendingStep, StepBatch
from pagewire.services.executor.devices.sim.roofline import Gpu, ModelShape, Roofline, shape_of

STEP = "pagewire step"
"""Annotation around each launch, for a profiler."""
WARM_UP = 8
"""Steps before those that count."""


@dataclass
class DecodeRun:
    """Decode steps of one size, launched as far ahead as the device allows."""

    model: str
    rows: int
    context: int
    wall_ms: list[float] = field(default_factory=list)
    """Milliseconds from one step's tokens on the host to those of the next."""
    device_ms: float = 0.0
    """Mean milliseconds of a step by the device's clock."""
    bytes: float = 0.0
    """Bytes that a step moves at least."""
    share: float = 0.0
    """Share of the copy bandwidth, by the median wall time."""
    simulated_ms: float | None = None
    """Milliseconds of this step in the simulator; None: it does not know this GPU."""

    @property
    def ms(self) -> float:
        """Median milliseconds of a step."""
        return statistics.median(self.wall_ms)


@dataclass
class PrefillRun:
    """A prompt in one step."""

    model: str
    tokens: int
    device_ms: list[float] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)
    """Milliseconds from its launch to its token on the host."""
    flops: float = 0.0
    share: float = 0.0
    """Share of the matrix rate, by the median time of the device."""
    simulated_ms: float | None = None
    """Milliseconds of this step in the simulator; None: it does not know this GPU."""


def decode(
    machine: Machine, models: dict[str, dict[str, Any]], cells: Sequence[Cell], steps: int, cached: torch.dtype
) -> Iterator[DecodeRun]:
    """Measures every cell that fits, model by model, in `steps` steps, of which the last is at its full context."""
    for name, config in models.items():
        shape = shape_of(config)
        fit = fitting(shape, cells, machine.room, cached.itemsize)
        if not fit:
            continue
        with opened(machine, config, fit, max(cell.rows for cell in fit), cached) as device:
            for cell in fit:
                run = DecodeRun(name, cell.rows, cell.context)
                run.wall_ms, run.device_ms = _decode(device, cell, steps)
                run.bytes = decode_bytes(shape, cell.rows, cell.context - (steps + 1) / 2, cached.itemsize)
                run.share = run.bytes / (run.ms / 1e3) / machine.bandwidth
                run.simulated_ms = simulated_ms(machine.simulated, shape, cell.context - (steps + 1) // 2, 1, cell.rows)
                yield run


def simulated_ms(gpu: Gpu | None, shape: ModelShape, computed: int, tokens: int, rows: int) -> float | None:
    """Returns the simulated time of a step of `rows` rows of `tokens` tokens, with `computed` tokens before each."""
    if gpu is None:
        return None
    computed_tokens, query_lens = np.full(rows, computed), np.full(rows, tokens)
    return Roofline(shape, gpu).seconds(computed_tokens, query_lens, np.ones(rows, np.bool_)) * 1e3


def decodes(rows: int, position: int) -> StepBatch:
    """Returns a step of one token of each of the first `rows` slots. Its id only counts in a slot's first step."""
    return StepBatch(
        slots=np.arange(rows),
        num_computed_tokens=np.full(rows, position),
        query_lens=np.ones(rows, np.int64),
        token_ids=np.ones(rows, np.int64),
        samples=np.ones(rows, np.bool_),
    )


def add_sequences(device: CudaDevice, rows: int, blocks: int) -> None:
    """Fills the slots [0, rows) with sequences whose blocks lie in random order."""
    ids = np.random.default_rng(0).permutation(rows * blocks).reshape(rows, blocks)
    for slot in range(rows):
        device.add(slot, ids[slot].tolist(), GREEDY)


def run_ahead(device: CudaDevice, batches: Iterable[StepBatch]) -> Iterator[None]:
    """Launches steps as far ahead as the device allows, and yields whenever the oldest has ended."""
    pending: deque[PendingStep] = deque()
    for batch in batches:
        if len(pending) == device.depth:
            pending.popleft().wait()
            yield
        with torch.profiler.record_function(STEP):
            pending.append(device.launch(batch))
    while pending:
        pending.popleft().wait()
        yield


def _decode(device: CudaDevice, cell: Cell, steps: int) -> tuple[list[float], float]:
    """Returns the wall times of `steps` steps, and their mean time on the device, in milliseconds."""
    add_sequences(device, cell.rows, cell.blocks // cell.rows)
    batches = (decodes(cell.rows, position) for position in range(cell.context - steps - WARM_UP, cell.context))
    seen = [(time.perf_counter(), device.busy) for _ in run_ahead(device, batches)][-steps - 1 :]
    wall = [(late[0] - early[0]) * 1e3 for early, late in pairwise(seen)]
    return wall, (seen[-1][1] - seen[0][1]) / steps * 1e3


def prefill(
    machine: Machine, models: dict[str, dict[str, Any]], sizes: Sequence[int], repeats: int, cached: torch.dtype
) -> Iterator[PrefillRun]:
    """Measures prompts of every size whose model fits, each in one step from position 0."""
    most = max(sizes)
    for name, config in models.items():
        shape = shape_of(config)
        longest = fitting(shape, [Cell(1, most)], machine.room, cached.itemsize)
        if not longest:
            continue
        with opened(machine, config, longest, most, cached) as device:
            for tokens in sizes:
                run = PrefillRun(name, tokens, flops=prefill_flops(shape, tokens))
                for repeat in range(repeats + 1):
                    times = _prefill(device, tokens)
                    if repeat:
                        run.device_ms.append(times[0] * 1e3)
                        run.wall_ms.append(times[1] * 1e3)
                run.share = run.flops / (statistics.median(run.device_ms) / 1e3) / machine.rate
                run.simulated_ms = simulated_ms(machine.simulated, shape, 0, tokens, 1)
                yield run


def _prefill(device: CudaDevice, tokens: int) -> tuple[float, float]:
    """Returns the seconds of one step, on the device and for the host."""
    add_sequences(device, 1, -(-tokens // BLOCK_SIZE))
    batch = StepBatch(
        slots=np.zeros(1, np.int64),
        num_computed_tokens=np.zeros(1, np.int64),
        query_lens=np.array([tokens]),
        token_ids=np.arange(tokens) % device.capacity.vocab_size,
        samples=np.ones(1, np.bool_),
    )
    busy, began = device.busy, time.perf_counter()
    device.launch(batch).wait()
    return device.busy - busy, time.perf_counter() - began


def decode_table(runs: Sequence[DecodeRun]) -> list[str]:
    """Returns a line per cell, in Markdown."""
    return markdown(
        "model | rows | context | step ms | on the device | simulated | GB moved | of the copy bandwidth | tokens/s",
        (
            f"{run.model} | {run.rows} | {run.context} | {run.ms:.3f} | {run.device_ms:.3f} | {_simulated(run)}"
            f" | {run.bytes / 1e9:.2f}"
            f" | {run.share:.1%} | {run.rows / run.ms * 1e3:.0f}"
            for run in runs
        ),
    )


def prefill_table(runs: Sequence[PrefillRun]) -> list[str]:
    """Returns a line per size, in Markdown."""
    return markdown(
        "model | tokens | ms | with the host | simulated | TFLOP | of the matrix rate | tokens/s",
        (
            f"{run.model} | {run.tokens} | {(ms := statistics.median(run.device_ms)):.2f}"
            f" | {statistics.median(run.wall_ms):.2f} | {_simulated(run)} | {run.flops / 1e12:.2f} | {run.share:.1%}"
            f" | {run.tokens / ms * 1e3:.0f}"
            for run in runs
        ),
    )


def _simulated(run: DecodeRun | PrefillRun) -> str:
    return "" if run.simulated_ms is None else f"{run.simulated_ms:.2f}"
