"""Tokens of many streams on a GPU, with few slots and tokens a step, and with its defaults (simulated)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagewire.bench._common.loads import sharegpt
from pagewire.bench._common.output import markdown
from pagewire.services.executor.devices.defaults import CPU, GPU, Defaults
from pagewire.services.executor.devices.sim.roofline import GPUS
from pagewire.services.executor.steps.slot_table import SlotTable
from tools.experiments.simulated_devices.virtual_time.pipeline import Host, VirtualPipeline, one_after_another
from tools.experiments.simulated_devices.virtual_time.systems import System, Variant, limits, roofline

REQUESTS = 4
"""Requests of each stream, one after the other."""


@dataclass(frozen=True, slots=True)
class StreamsRun:
    """Streams that send their next request when the last has ended."""

    streams: int
    slots: int
    step_tokens: int
    tokens_per_s: float
    """Generated tokens per second."""
    bandwidth_share: float
    """Share of the memory bandwidth that weights and KV cache take in the time of all steps."""


def serve(system: System, streams: int, defaults: Defaults, seed: int) -> StreamsRun:
    """Returns the figures of one run in virtual time."""
    times = roofline(system)
    bounds = replace(
        limits(system, Variant(budget=defaults.step_tokens)), max_num_seqs=defaults.max_num_seqs, max_plan_bytes=1 << 30
    )
    pipeline = VirtualPipeline(bounds, times, Host(), SlotTable, 2 * system.longest)
    waiting = sharegpt(random.Random(seed), streams * REQUESTS)

    trace = pipeline.run([waiting.pop() for _ in range(streams)], one_after_another(waiting))
    span = max(request.tokens_at[-1] for request in trace.requests)
    share = trace.moved / trace.busy / (GPUS[system.gpu].bandwidth * system.degree)
    tokens = sum(request.output for request in trace.requests)
    return StreamsRun(streams, defaults.max_num_seqs, defaults.step_tokens, tokens / span, share)


def measure(system: System, streams: Sequence[int], seed: int) -> list[StreamsRun]:
    """Returns runs with the defaults of a CPU and with those of a GPU, for each number of streams."""
    return [serve(system, count, defaults, seed) for count in streams for defaults in (CPU, GPU)]


def table(runs: Sequence[StreamsRun]) -> list[str]:
    """Returns a line per run, in Markdown."""
    return markdown(
        "streams (simulated) | slots | tokens a step | tokens/s | of the bandwidth",
        (
            f"{run.streams} | {run.slots} | {run.step_tokens} | {run.tokens_per_s:.0f} | {run.bandwidth_share:.1%}"
            for run in runs
        ),
    )
