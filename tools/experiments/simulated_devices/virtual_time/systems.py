"""The simulated machines of the benchmarks, and the settings of a run on one of them."""

from dataclasses import dataclass
from functools import cache

from pagewire.bench.shapes import SHAPES
from pagewire.services.executor.devices.sim.roofline import GPUS, Roofline, shape_of
from pagewire.services.executor.steps.slot_table import SlotTable
from pagewire.services.scheduler.policy.term_limits import TermLimits
from tools.experiments.simulated_devices.virtual_time.pipeline import Host, VirtualPipeline
from tools.experiments.simulated_devices.virtual_time.prefill_first import PrefillFirst

MEMORY_SHARE = 0.9
"""Share of a GPU's memory for weights and KV cache."""
SLOTS = 256


@dataclass(frozen=True, slots=True)
class System:
    """A model on GPUs."""

    shape: str
    """One of `SHAPES`."""
    gpu: str
    """One of `GPUS`."""
    degree: int
    """GPUs that share the model."""
    longest: int
    """Context, in tokens: also the prefill cap where prompts go first, as in vLLM 0.2."""

    @property
    def name(self) -> str:
        """Name in headings."""
        return f"{self.shape} on {self.degree} x {self.gpu}"


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings of the engine."""

    window: int = 8
    splitfuse: bool = True
    asynchronous: bool = True
    prefix_cache: bool = True
    block_size: int = 16
    budget: int = 512


@cache
def roofline(system: System) -> Roofline:
    """Returns the step times of a system."""
    return Roofline(shape_of(SHAPES[system.shape]), GPUS[system.gpu], system.degree)


def pipeline(system: System, variant: Variant) -> VirtualPipeline:
    """Returns a new engine."""
    table = SlotTable if variant.splitfuse else PrefillFirst
    host = Host(asynchronous=variant.asynchronous)
    return VirtualPipeline(limits(system, variant), roofline(system), host, table, 2 * system.longest)


def limits(system: System, variant: Variant) -> TermLimits:
    """Returns the limits that a system sets the scheduler."""
    times = roofline(system)
    return TermLimits(
        num_blocks=times.kv_memory(MEMORY_SHARE) // (times.kv_bytes * variant.block_size),
        block_size=variant.block_size,
        max_num_seqs=SLOTS,
        budget=variant.budget if variant.splitfuse else system.longest,
        window=variant.window,
        prefix_cache=variant.prefix_cache,
    )
