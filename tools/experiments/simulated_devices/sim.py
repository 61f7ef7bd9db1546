"""Measures how replicas of one model share the work of a fleet, in virtual time, on simulated GPUs (simulated).

Clients hold conversations with lengths of ShareGPT: each prompt repeats what was said before it. Twice as many replicas
serve twice as many clients. The scheduler's policy, the executor's slot table and the tokenizer's routing are the real
ones. Every figure is simulated.
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product

import numpy as np

from pagewire.bench._common.loads import Request
from pagewire.bench._common.output import add_output, markdown, write
from pagewire.bench.shapes import SHAPES
from pagewire.services.executor.devices.sim.roofline import GPUS, Roofline, shape_of
from pagewire.services.executor.steps.slot_table import SlotTable
from tools.experiments._common.chart import chart
from tools.experiments.simulated_devices.virtual_time import streams
from tools.experiments.simulated_devices.virtual_time.clock import Clock
from tools.experiments.simulated_devices.virtual_time.conversations import Client
from tools.experiments.simulated_devices.virtual_time.fleet import Fleet
from tools.experiments.simulated_devices.virtual_time.pipeline import Host, VirtualPipeline
from tools.experiments.simulated_devices.virtual_time.systems import System, Variant, limits

SYSTEM = System("llama-3-8b", "h100", 1, 8192)
SLOTS = 64
WARM_UP = 30.0
"""Seconds before anything is counted: by then conversations are spread over all turns."""
HEADER = "clients each (simulated) | replicas | tokens/s | of one | TTFT ms, P50 / P99 | hit rate | of one large"


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a run."""

    clients: int
    """Clients per replica."""
    think: float
    """Mean seconds between an answer and the next question."""
    seconds: float
    """Seconds that are counted."""
    seed: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of one run."""

    replicas: int
    clients: int
    """Clients per replica."""
    tokens_per_s: float
    """Generated tokens per second."""
    ttft_p50: float
    """Seconds to the first token."""
    ttft_p99: float
    """Seconds to the first token."""
    hit_rate: float
    """Share of the prompts' tokens that were cached."""
    large_hit_rate: float
    """Hit rate of one replica with the pool, the slots and the speed of all, under the same clients."""
    imbalance: float
    """Positions computed by the replica that computed most, over the mean."""


def main(arguments: list[str]) -> int:
    """Prints a table and writes `--output`."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments sim", description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="replicas of each run")
    parser.add_argument("--clients", type=int, nargs="+", default=[250, 400], help="clients per replica of each run")
    parser.add_argument("--think", type=float, default=10.0, help="mean seconds between answer and next question")
    parser.add_argument("--seconds", type=float, default=30.0, help="virtual seconds that are counted")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256], help="streams to one replica of each run")
    parser.add_argument("--seed", type=int, default=0, help="of every draw")
    parser.add_argument("--jobs", type=int, help="processes; as many as there are cores by default")
    add_output(parser)
    options = parser.parse_args(arguments)
    loads = [Load(clients, options.think, options.seconds, options.seed) for clients in options.clients]
    with ProcessPoolExecutor(options.jobs) as pool:
        runs = list(pool.map(measure, *zip(*product(options.replicas, loads), strict=True)))
    runs.sort(key=lambda run: (run.clients, run.replicas))
    print("\n".join([f"Simulated: {SYSTEM.name} each, {SLOTS} slots.", "", *table(runs)]))
    many = streams.measure(SYSTEM, options.streams, options.seed)
    print("\n".join(["", f"Simulated: one {SYSTEM.name}, ShareGPT lengths.", "", *streams.table(many)]))
    about = {"simulated": True, "system": asdict(SYSTEM), "loads": [asdict(load) for load in loads]}
    write(
        options.output,
        parser.prog,
        arguments,
        **about,
        runs=[asdict(run) for run in runs],
        streams=[asdict(run) for run in many],
    )
    return 0


def measure(replicas: int, load: Load) -> Figures:
    """Returns the figures of so many replicas, and the hit rate of one that is as large as all of them."""
    served = serve(replicas, 1, load)
    large = serve(1, replicas, load) if replicas > 1 else served
    ttft = [request.ttft for request in served.requests]
    return Figures(
        replicas=replicas,
        clients=load.clients,
        tokens_per_s=served.tokens / load.seconds,
        ttft_p50=float(np.percentile(ttft, 50)),
        ttft_p99=float(np.percentile(ttft, 99)),
        hit_rate=served.hit_rate,
        large_hit_rate=large.hit_rate,
        imbalance=max(served.computed) / (sum(served.computed) / replicas),
    )


@dataclass(frozen=True, slots=True)
class Served:
    """Results of the counted time."""

    requests: list[Request]
    """Requests that were sent in it."""
    tokens: int
    """Tokens that reached clients in it."""
    computed: list[int]
    """Positions computed per replica."""

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that were cached."""
        return sum(request.cached for request in self.requests) / sum(len(request.prompt) for request in self.requests)


def serve(replicas: int, size: int, load: Load) -> Served:
    """Runs `replicas` replicas that are each as large as `size` of the usual ones, and their clients."""
    clock = Clock()
    everyone = [Client(number, load.seed, load.think) for number in range(load.clients * replicas * size)]
    end = WARM_UP + load.seconds
    requests: list[Request] = []
    computed: list[int] = []

    def ask(client: Client) -> None:
        request = client.ask(clock.now)
        if request.at < end:
            requests.append(request)
            clock.at(request.at, fleet.send, request)

    def on_finish(request: Request) -> None:
        everyone[request.client].receive(request.tokens)
        ask(everyone[request.client])

    def stop() -> None:
        computed.extend(fleet.computed)
        fleet.close()

    pipelines = [machine(size, clock) for _ in range(replicas)]
    fleet = Fleet(clock, pipelines, on_finish)
    clock.at(WARM_UP, fleet.forget)
    clock.at(end, stop)
    for client in everyone:
        ask(client)
    clock.run()
    tokens = sum(WARM_UP <= at < end for request in requests for at in request.tokens_at)
    return Served([request for request in requests if request.at >= WARM_UP], tokens, computed)


def machine(size: int, clock: Clock) -> VirtualPipeline:
    """Returns a replica with `size` times the slots, the memory and the speed of one GPU."""
    gpu, shape = GPUS[SYSTEM.gpu], shape_of(SHAPES[SYSTEM.shape])
    fast = replace(gpu, flops=gpu.flops * size, bandwidth=gpu.bandwidth * size)
    one = limits(SYSTEM, Variant())
    large = replace(one, num_blocks=one.num_blocks * size, max_num_seqs=SLOTS * size, budget=one.budget * size)
    return VirtualPipeline(large, Roofline(shape, fast), Host(), SlotTable, 2 * SYSTEM.longest, clock)


def table(runs: Sequence[Figures]) -> list[str]:
    """Returns a line per run, in Markdown. Runs of the same clients per replica are compared with the first of them."""
    firsts = {run.clients: run for run in reversed(runs)}
    return markdown(
        HEADER,
        (
            f"{run.clients} | {run.replicas} | {run.tokens_per_s:.0f}"
            f" | {run.tokens_per_s / firsts[run.clients].tokens_per_s * firsts[run.clients].replicas:.2f}"
            f" | {run.ttft_p50 * 1e3:.0f} / {run.ttft_p99 * 1e3:.0f} | {run.hit_rate:.1%}"
            f" | {run.hit_rate / run.large_hit_rate:.1%}"
            for run in runs
        ),
    )


def curve(runs: Sequence[Figures]) -> str:
    """Draws throughput by number of replicas, and the throughput of a fleet that scales perfectly."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for clients, group in groupby(runs, key=lambda run: run.clients):
        group_runs = list(group)
        one = group_runs[0].tokens_per_s / group_runs[0].replicas
        lines[f"{clients} clients each"] = [(run.replicas, run.tokens_per_s) for run in group_runs]
        lines[f"perfect, {clients}"] = [(run.replicas, run.replicas * one) for run in group_runs]
    return chart(f"{SYSTEM.name} each, simulated", "replicas", "output tokens/s", lines)
