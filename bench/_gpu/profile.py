"""Finds the gaps in which the GPU waits, in a trace of torch.profiler."""

import json
import tempfile
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagewire.bench._common.output import markdown
from pagewire.bench._gpu.machine import Machine, opened
from pagewire.bench._gpu.plan import Cell, fitting
from pagewire.bench._gpu.steps import STEP, WARM_UP, add_sequences, decodes, run_ahead
from pagewire.services.executor.devices.sim.roofline import shape_of

_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_HOST = {"cuda_runtime", "cuda_driver"}
_SHORT = 2.0
"""Microseconds: a trace has thousands of shorter gaps, which are not kept unless the host waited in them."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which the GPU did nothing."""

    us: float
    step: int
    """The step whose work ends it."""
    between: bool
    """Whether the gap lies between that step and the one before; else it lies within the step."""
    waited_for: str
    """The host's call that delayed the launch of that work, a host sync; empty if there was none."""


@dataclass
class ProfileRun:
    """The result of a trace of decode steps."""

    model: str
    rows: int
    steps: int
    busy: float
    """Share of the time from the first step's first work to the last step's end in which the GPU did something."""
    gaps: list[Gap]
    """Gaps of 2 microseconds and more, and all host syncs."""

    @property
    def host_syncs(self) -> list[Gap]:
        """Gaps in which the GPU waited because the host waited for it."""
        return [gap for gap in self.gaps if gap.waited_for]


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    begin: float
    end: float


def read(events: Iterable[Mapping[str, Any]], skipped: int = 0) -> tuple[float, list[Gap]]:
    """Returns the busy share and all gaps of the steps in a trace: `traceEvents` of the Chrome format, in microseconds.

    The first `skipped` steps do not count; work on any stream does. A gap is a host sync when the call that launches
    the work behind it began only after another call had waited for the GPU, from before the gap into it.

    Raises:
        RuntimeError: no work of a step is in the trace.
    """
    work, launches, waits, steps = [], {}, [], []
    for event in events:
        if "dur" not in event:
            continue
        begin, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        kind, correlation = event.get("cat"), event.get("args", {}).get("correlation")
        if kind in _GPU:
            work.append((begin, end, correlation))
        elif kind in _HOST:
            call = _Call(event["name"], begin, end)
            launches[correlation] = call
            if "Synchronize" in call.name:
                waits.append(call)
        elif kind == "user_annotation" and event["name"] == STEP:
            steps.append((begin, end))
    steps.sort()

    def step_of(correlation: Any) -> int:
        """Returns the step that launched the work; -1 if it was launched outside of all steps."""
        call = launches.get(correlation)
        index = bisect_right(steps, (call.begin, float("inf"))) - 1 if call else -1
        return index if index >= 0 and call is not None and call.begin <= steps[index][1] else -1

    owned = sorted((begin, end, step_of(correlation), correlation) for begin, end, correlation in work)
    owned = [entry for entry in owned if entry[2] >= skipped]
    if not owned:
        raise RuntimeError("the trace has no work of a step: were GPU activities recorded?")
    gaps: list[Gap] = []
    first, reached, newest = owned[0][0], owned[0][1], owned[0][2]
    for begin, end, step, correlation in owned[1:]:
        if begin > reached:
            launched = launches[correlation].begin
            waited = next((w.name for w in waits if w.begin <= reached < w.end <= launched), "")
            gaps.append(Gap(begin - reached, step, step > newest, waited))
        reached, newest = max(reached, end), max(newest, step)
    span = reached - first
    return 1 - sum(gap.us for gap in gaps) / span, gaps


def profile(machine: Machine, models: dict[str, dict[str, Any]], cell: Cell, steps: int) -> Iterator[ProfileRun]:
    """Traces the last `steps` decode steps that lead to `cell`, where it fits, as far ahead as the device allows."""
    rows, context = cell.rows, cell.context
    itemsize = machine.dtype.itemsize
    for name, config in models.items():
        if not fitting(shape_of(config), [cell], machine.room, itemsize):
            continue
        with opened(machine, config, [cell], rows, machine.dtype) as device:
            add_sequences(device, rows, cell.blocks // rows)
            batches = (decodes(rows, position) for position in range(context - steps - WARM_UP, context))
            with torch.profiler.profile() as recorded:
                deque(run_ahead(device, batches), maxlen=0)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                recorded.export_chrome_trace(str(path))
                busy, gaps = read(json.loads(path.read_text())["traceEvents"], WARM_UP)
        yield ProfileRun(name, rows, steps, busy, [gap for gap in gaps if gap.us >= _SHORT or gap.waited_for])


def table(runs: Sequence[ProfileRun]) -> list[str]:
    """Returns a line per model, in Markdown."""

    def largest(run: ProfileRun, *, between: bool) -> float:
        return max((gap.us for gap in run.gaps if gap.between == between), default=0.0)

    return markdown(
        "model | sequences | steps | busy | largest gap between steps us | within us | host syncs",
        (
            f"{run.model} | {run.rows} | {run.steps} | {run.busy:.1%} | {largest(run, between=True):.1f}"
            f" | {largest(run, between=False):.1f} | {len(run.host_syncs)}"
            for run in runs
        ),
    )
