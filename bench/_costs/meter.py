"""Measures CPU time on a busy machine: each turn lies between two runs of a yardstick, and the median counts."""

import asyncio
import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvloop

from pagewire.bench._costs import reference
from pagewire.bench._costs.rig import Open
from pagewire.bench._costs.tap import Wrap, unchanged

_TURNS = 50
_REFERENCE = 64
"""Iterations of the yardstick between two turns."""
_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Reading:
    """The cost of a unit of a service."""

    cost: float
    """Iterations of the yardstick."""
    microseconds: float
    """CPU time of a unit on this machine, in microseconds."""
    per_message: float
    """Units of each message that its handler takes in."""


def measure(rig: Open, wrap: Wrap = unchanged) -> Reading:
    """Returns the CPU time of all threads of this process, per unit.

    A core changes its speed, and other programs take its cache. So a turn of a few milliseconds is compared with the
    yardstick right before and right after it, and not with the fastest run of the yardstick.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(rig, wrap))


async def _measure(open_rig: Open, wrap: Wrap) -> Reading:
    costs: list[float] = []
    ratios: list[float] = []
    async with open_rig(wrap) as rig:
        for _ in range(_WARM_UP):
            rig.prepare()
            await rig.turn()
        with _no_collection():
            before = _yardstick()
            for _ in range(_TURNS):
                await asyncio.sleep(0)  # a service that never got its turn would count itself as frozen
                rig.prepare()
                began = time.process_time()
                units = await rig.turn()
                costs.append((time.process_time() - began) / units)
                behind = _yardstick()
                ratios.append(2 * costs[-1] / (before + behind))
                before = behind
        return Reading(statistics.median(ratios), statistics.median(costs) * 1e6, rig.per_message)


def _yardstick() -> float:
    """Returns the CPU seconds of an iteration."""
    began = time.process_time()
    reference.run(_REFERENCE)
    return (time.process_time() - began) / _REFERENCE


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
