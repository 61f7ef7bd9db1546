"""A small machine whose steps take round numbers, and requests for it."""

from pagewire.bench._common.loads import Request
from pagewire.services.executor.devices.sim.roofline import Efficiency, Gpu, ModelShape, Roofline
from pagewire.services.executor.steps.slot_table import SlotTable
from pagewire.services.scheduler.policy.term_limits import TermLimits
from tools.experiments.simulated_devices.virtual_time.pipeline import Host, Trace, VirtualPipeline

GPU = Gpu(flops=2e5, bandwidth=1e12, memory=1 << 30, link=1.0, issue=float("inf"), arch=90)
MACHINE = Roofline(
    ModelShape(hidden=8, heads=0, kv_heads=1, head_dim=8, vocab=0, windows=(0,), layer_weights=1, weights=1),
    GPU,
    1,
    Efficiency(compute=1.0, bandwidth=1.0, launch=10e-3, layer=0.0),
)
"""A step takes 10 ms, and 10 us for each of its tokens."""
INSTANT = Host(step=0.0, step_row=0.0, schedule=0.0, schedule_row=0.0, round_trip=0.0, edge=0.0)


def request(at: float, prompt: int, output: int, first: int = 1) -> Request:
    """A prompt whose ids count up from `first`."""
    return Request(at, list(range(first, first + prompt)), output)


def limits(
    *, blocks: int = 4096, block_size: int = 16, slots: int = 16, budget: int = 128, window: int = 8, cache: bool = True
) -> TermLimits:
    return TermLimits(blocks, block_size, slots, budget, window, cache)


def serve(
    *requests: Request, table: type[SlotTable] = SlotTable, host: Host = INSTANT, within: TermLimits | None = None
) -> Trace:
    return VirtualPipeline(within or limits(), MACHINE, host, table, 4096).run(requests)
