"""Kills, freezes, starves and cuts off services and the broker, and disturbs the store, under streams that are checked.

Clients keep requests of all shapes running over NATS and HTTP. Each is compared with its answer from before the first
fault. Faults come one at a time: the next one comes when every service is ready again. The same seed gives the same
requests and the same faults in the same order. A service is cut off by a proxy between it and the broker. The exit code
is 1 if a request was lost, duplicated, reordered, wrong or hung.

A pause is the longest time that any client waited for the next step of its stream during a fault; keep-alives are no
step. With a simulated device the tokens are not a model's.
"""

import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from itertools import cycle
from typing import Any

import msgspec

from pagewire.bench._chaos import figures
from pagewire.bench._chaos.checks import Seen
from pagewire.bench._chaos.false_clock import false_clock
from pagewire.bench._chaos.faults import Applied, Arena, arena
from pagewire.bench._chaos.figures import Ended
from pagewire.bench._chaos.other_version import newer_package
from pagewire.bench._chaos.readers import DEADLINE, Reader, open_reader
from pagewire.bench._chaos.requests import HTTP, NATS, Request, mixture
from pagewire.bench._chaos.schedule import DEFAULT, JOIN, KINDS, SKEW, possible, schedule, select
from pagewire.bench._chaos.trial import answers
from pagewire.bench._common.output import json_file, write
from pagewire.shared.models.model_folder import served_name
from pagewire.shared.settings.config import Settings
from pagewire.shared.settings.flags import Parser
from pagewire.shared.telemetry import logs

TOKENS = {"cpu": 48, "sim": 600}
"""Tokens of an answer, at most, by kind of device: answers take about as long as a fault."""


@dataclass(frozen=True, slots=True)
class Clients:
    """The clients of a run."""

    number: int
    """Requests at a time, half of them over HTTP."""
    deadline: float = DEADLINE
    """Seconds that a request has over NATS."""


@dataclass
class Run:
    """A stack under faults. Times are those of the monotonic clock."""

    device: str
    executors: int
    models: int = 1
    start: float = 0.0
    seconds: float = 0.0
    cold_start: float = 0.0
    """Seconds that an idle executor needs, from its end until its successor is ready."""
    faults: list[Applied] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    """Load average of the machine over the last minute, after each fault."""
    unrecovered: str = ""
    """The fault after which the stack has not become ready again."""

    @property
    def failed(self) -> bool:
        """Whether the stack or a request has failed."""
        return bool(self.unrecovered or figures.failures(self.ended, self.faults, self.start))


def main(arguments: list[str]) -> int:
    """Prints a table per device and all failures, and writes `--json`."""
    parser = Parser(prog="pagewire bench chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the requests and the faults")
    parser.add_argument("--minutes", type=float, default=2.0, help="time under faults, per device")
    parser.add_argument("--device", nargs="+", default=["cpu", "sim:h100"], help="devices, one after the other")
    text = "models of the stack, served side by side; default: the default model"
    parser.add_argument("--model", nargs="+", default=[""], help=text)
    parser.add_argument("--executors", type=int, default=1, help="replicas: executors, each with a scheduler")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks of each executor")
    parser.add_argument("--clients", type=int, default=8, help="requests at a time, half of them over HTTP")
    parser.add_argument(
        "--slots", type=int, help="requests that run at a time; with fewer than clients, the others queue"
    )
    parser.add_argument("--spec-type", default="none", help="the method that drafts tokens on a CPU")
    parser.add_argument("--deadline", type=float, default=DEADLINE, help="seconds that a request has over NATS")
    parser.add_argument(
        "--kinds", type=select, default=DEFAULT, help=f"such as kill:executor,stop; all: {' '.join(KINDS)}"
    )
    parser.add_argument("--json", type=json_file, dest="output", help="JSON file for the raw results")
    options = parser.parse_args(arguments)
    kinds = possible(options.kinds, options.tensor_parallel_size)
    if not kinds:
        parser.error("faults of ranks need a --tensor-parallel-size above 1")
    logs.configure(Settings(log_level="error"), service="bench")
    runs = []
    for device in options.device:
        settings = Settings(
            model=options.model[0],
            device=device,
            data_parallel_size=options.executors,
            tensor_parallel_size=options.tensor_parallel_size,
            seed=1,  # of requests without a seed of their own: a simulated device draws all tokens by seed
            num_kv_blocks=2048,
            max_num_seqs=options.slots,
            spec_type=options.spec_type if device == "cpu" else "none",
            log_level="error",
        )
        clients = Clients(options.clients, options.deadline)
        others = [msgspec.structs.replace(settings, model=name) for name in options.model[1:]]
        run = asyncio.run(measure([settings, *others], options.seed, options.minutes * 60, kinds, clients))
        print("\n".join(report(run)))
        runs.append(run)
    write(options.output, parser.prog, arguments, runs=[_raw(run) for run in runs])
    return int(any(run.failed for run in runs))


def table_of(raw: Mapping[str, Any]) -> list[str]:
    """Returns the table of a run, from its raw results."""
    name = label(raw["device"], raw["executors"], raw.get("models", 1))
    load = f", load average {raw['load']:.0f}" if "load" in raw else ""
    return figures.table(name + load, [figures.Row(**row) for row in raw["rows"]], raw["cold_start"])


def label(device: str, executors: int, models: int) -> str:
    """Returns the device, the number of models and that of executors of each, in words."""
    simulated = " (simulated)" if device.startswith("sim:") else ""
    several = f"{models} models, each with " if models > 1 else ""
    return f"{device}{simulated}, {several}{executors} executor{'s' * (executors > 1)}"


def report(run: Run) -> list[str]:
    """Returns the table of a run and a line per failure."""
    lines = table_of(_raw(run))
    lines += ["", *figures.failures(run.ended, run.faults, run.start)]
    if run.unrecovered:
        lines.append(f"the stack has not become ready again after {run.unrecovered}")
    return lines


async def measure(models: Sequence[Settings], seed: int, seconds: float, kinds: Sequence[str], clients: Clients) -> Run:
    """Runs a stack of these models under faults for some time."""
    settings = models[0]
    names = [served_name(model) for model in models] if len(models) > 1 else [""]
    run = Run(settings.device, settings.data_parallel_size, len(models))
    async with AsyncExitStack() as exits:
        skews = any(kind.startswith(SKEW) for kind in kinds)
        clock = exits.enter_context(false_clock()) if skews else None
        joins = any(kind.startswith(JOIN) for kind in kinds)
        newer = exits.enter_context(newer_package()) if joins else None
        stack = await exits.enter_async_context(arena(settings, clock, models[1:], newer))
        requests = mixture(seed, TOKENS[settings.device.partition(":")[0]], models=names)
        expected = await answers(stack.address, requests, clients.deadline)
        run.cold_start = await stack.cold_start()
        run.start = time.monotonic()
        ending = asyncio.Event()
        seen: list[tuple[Request, Seen]] = []
        async with asyncio.TaskGroup() as tasks:
            for number, transport in zip(range(clients.number), cycle((NATS, HTTP)), strict=False):
                theirs = [request for request in requests if request.transport == transport]
                rng = random.Random(f"client {seed} {number}")
                reader = await open_reader(transport, stack.address, clients.deadline)
                tasks.create_task(_talk(reader, theirs, rng, seen, ending))
            try:
                await _disturb(stack, seed, seconds, kinds, run)
            finally:
                ending.set()
        run.seconds = time.monotonic() - run.start
    run.ended = [figures.examine(request, expected[request.number], each, run.faults) for request, each in seen]
    return run


async def _talk(
    reader: Reader,
    requests: Sequence[Request],
    rng: random.Random,
    ended: list[tuple[Request, Seen]],
    ending: asyncio.Event,
) -> None:
    """Sends requests one after the other until the run ends."""
    try:
        while not ending.is_set():
            request, seen = rng.choice(requests), Seen()
            await reader.read(request, seen)
            ended.append((request, seen))
    finally:
        await reader.close()


async def _disturb(stack: Arena, seed: int, seconds: float, kinds: Sequence[str], run: Run) -> None:
    for fault in schedule(seed, kinds):
        await asyncio.sleep(fault.rest)
        if time.monotonic() > run.start + seconds:
            return
        began = time.monotonic()
        try:
            run.faults += await stack.apply(fault)
        except TimeoutError:
            run.faults.append(Applied(fault, began, began, time.monotonic()))
            run.unrecovered = f"{fault.kind} at {began - run.start:.1f} s"
            return
        run.loads.append(os.getloadavg()[0])
        applied = run.faults[-1]
        print(
            f"{began - run.start:7.1f} s  {fault.kind:<18} {applied.over - began:4.1f} s,"
            f" ready after {applied.recovered - applied.over:.1f} s",
            file=sys.stderr,
        )


def _raw(run: Run) -> dict[str, Any]:
    return {
        "device": run.device,
        "simulated": run.device.startswith("sim:"),
        "executors": run.executors,
        "models": run.models,
        "load": statistics.median(run.loads or [0.0]),
        "seconds": run.seconds,
        "cold_start": run.cold_start,
        "rows": [asdict(row) for row in figures.rows(run.faults, run.ended)],
        "failures": figures.failures(run.ended, run.faults, run.start),
        "unrecovered": run.unrecovered,
        "faults": [
            {
                **asdict(applied.fault),
                "began": applied.began - run.start,
                "over": applied.over - run.start,
                "recovered": applied.recovered - run.start,
                "pause": pause.seconds,
                "pause_began": pause.began - run.start,
                "pause_of": pause.request,
            }
            for applied, pause in zip(run.faults, figures.pauses(run.faults, run.ended), strict=True)
        ],
    }
