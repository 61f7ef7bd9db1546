"""A stack whose services and broker can be killed, frozen, terminated and cut off, and whose store can be filled."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pagewire.bench._chaos.false_clock import FalseClock
from pagewire.bench._chaos.other_version import serve_beside
from pagewire.bench._chaos.proxy import HOST, Proxy
from pagewire.bench._chaos.schedule import (
    CLOCKS,
    CUT,
    DAMAGE,
    FULL,
    KILL,
    MACHINE,
    RANK,
    STARVE,
    STOP,
    STORE,
    VERSION,
    Fault,
)
from pagewire.bench._chaos.starvation import occupy_cores, starve
from pagewire.bench._chaos.store_faults import damage_store, disturb_store
from pagewire.embedded.address import Address
from pagewire.embedded.programs import GATEWAY, PIPELINE, programs_of
from pagewire.embedded.stack import BROKER, SUPERVISOR, Stack
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, nats
from pagewire.shared.errors import BusError
from pagewire.shared.process.discovery import ask
from pagewire.shared.process.linux_process import children
from pagewire.shared.settings.config import Settings

MAX_STORE = 32 << 20
"""Bytes of the store: little, so that it is soon full."""
RECOVERY = 60.0
"""Seconds until the stack must be ready again."""
SKEW_SECONDS = 600.0
"""Seconds by which the services' clocks differ from the broker's, in either direction."""
POLL = 0.02
"""Seconds between two checks of processes."""


@dataclass(frozen=True, slots=True)
class Applied:
    """A fault that has happened. Times are those of the monotonic clock."""

    fault: Fault
    began: float
    over: float
    """Time at which the fault had ended by itself: the process was continued, the store had room."""
    recovered: float
    """Time at which every service had said that it was ready again."""


class Arena:
    """A running stack, and the means to disturb it; `arena` starts one."""

    def __init__(
        self,
        stack: Stack,
        proxies: Mapping[str, Proxy],
        address: Address,
        bus: Bus,
        clock: FalseClock | None = None,
        newer: Path | None = None,
    ) -> None:
        self._clock = clock
        self._newer = newer
        self.stack = stack
        self.address = address
        self._proxies = proxies
        self._bus = bus

    async def apply(self, *faults: Fault) -> list[Applied]:
        """Lets faults happen at the same time; returns once they are over and the stack is ready again.

        Raises:
            TimeoutError: it does not become ready.
        """
        began = time.monotonic()
        overs = await asyncio.gather(*(self._apply(fault) for fault in faults))
        async with asyncio.timeout(RECOVERY):
            await self.stack.ready(since=max(overs))
            await self._records_stored()
            if any(fault.target == STORE or fault.action == DAMAGE for fault in faults):
                await self._items_restored()
        recovered = time.monotonic()
        return [Applied(fault, began, over, recovered) for fault, over in zip(faults, overs, strict=True)]

    async def unfinished(self) -> int:
        """Returns the number of requests that are accepted and have not ended."""
        queues = [
            await self._bus.store.queue_lengths(subjects.all_work(subjects.model_token(name)))
            for name in self.stack.models
        ]
        return sum(sum(lengths.items.values()) for lengths in queues)

    async def cold_start(self) -> float:
        """Kills the idle executor; returns the seconds from then until its successor is ready."""
        (applied,) = await self.apply(Fault("kill:executor"))
        return applied.recovered - applied.began

    def _program(self, fault: Fault) -> str:
        """Returns the process that a fault hits."""
        if fault.target == BROKER:
            return BROKER
        owner = "executor" if fault.target == RANK else fault.target
        programs = [name for name, service in self.stack.programs.items() if service == owner]
        return programs[fault.replica % len(programs)]

    async def _apply(self, fault: Fault) -> float:
        """Lets a fault happen; returns when it was over."""
        if fault.target == STORE or fault.action == FULL:
            await disturb_store(self._bus, fault.action, fault.seconds)
            return time.monotonic()
        if fault.target == CLOCKS:
            assert self._clock is not None, "the stack was started with the right clock"
            self._clock.set(SKEW_SECONDS if fault.replica % 2 else -SKEW_SECONDS)
            await asyncio.sleep(fault.seconds)
            self._clock.set(0)
            return time.monotonic()
        if fault.target == MACHINE:
            await occupy_cores(fault.seconds)
            return time.monotonic()
        if fault.target == VERSION:
            assert self._newer is not None, "the stack was started without another version of the package"
            user, password = self.stack.operator
            settings = msgspec.structs.replace(self.stack.settings, nats_user=user, nats_password=password)
            await serve_beside(self._newer, settings, fault.seconds)
            return time.monotonic()
        program = self._program(fault)
        if fault.target == RANK:
            await self._disturb_rank(program, fault)
            return time.monotonic()
        if fault.action == CUT:
            self._proxies[program].cut()
            await asyncio.sleep(fault.seconds)
            self._proxies[program].mend()
        elif fault.action == STARVE:
            await starve(await self._running(program), fault.seconds)
        elif fault.action == STOP:
            pid = await self._running(program)
            _send(pid, signal.SIGSTOP)
            await asyncio.sleep(fault.seconds)
            _send(pid, signal.SIGCONT)  # unless it was given up and killed meanwhile
        else:
            pid = await self._running(program)
            if fault.action == DAMAGE:
                damage_store(self.stack.brokers[0])
            else:
                _send(pid, signal.SIGKILL if fault.action == KILL else signal.SIGTERM)
            # One that is terminated may have a successor before it ends.
            while self.stack.pid(program) in {pid, None} or _runs(pid):  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(POLL)
        return time.monotonic()

    async def _disturb_rank(self, program: str, fault: Fault) -> None:
        """Kills or stops one of an executor's ranks; returns when it goes on, or the executor has been replaced."""
        while not (ranks := children(pid := await self._running(program))):  # noqa: ASYNC110 - processes send no events
            await asyncio.sleep(POLL)
        rank = ranks[fault.replica % len(ranks)]
        if fault.action == STOP:
            _send(rank, signal.SIGSTOP)
            await asyncio.sleep(fault.seconds)
            _send(rank, signal.SIGCONT)
            return
        _send(rank, signal.SIGKILL)
        while self.stack.pid(program) in {pid, None}:  # noqa: ASYNC110
            await asyncio.sleep(POLL)

    async def _running(self, program: str) -> int:
        """Returns the process id of a program, once it runs."""
        while (pid := self.stack.pid(program)) is None:  # noqa: ASYNC110 - processes send no events
            await asyncio.sleep(POLL)
        return pid

    async def _items_restored(self) -> None:
        """Waits until no request of a scheduler is in its memory alone: it looks three times, the first time perhaps
        before the fault."""
        before = await self._item_checks()
        while True:
            checks = await self._item_checks()
            if checks and all(count >= before.get(instance, 0) + 3 for instance, count in checks.items()):
                return
            await asyncio.sleep(POLL)

    async def _item_checks(self) -> dict[str, float]:
        """Returns how often each scheduler has compared its requests with the store."""
        with suppress(BusError):
            replies = await ask(self._bus, "scheduler")
            return {reply.id: float(reply.metadata["load.item_checks"]) for reply in replies}
        return {}

    async def _records_stored(self) -> None:
        """Waits until no record of an ended request is in memory alone: a kill would lose it."""
        while True:
            with suppress(BusError):
                replies = await ask(self._bus, "detokenizer")
                if replies and not any(float(each.metadata.get("load.records_waiting", 0)) for each in replies):
                    return
            await asyncio.sleep(POLL)


@asynccontextmanager
async def arena(
    settings: Settings, clock: FalseClock | None = None, others: Sequence[Settings] = (), newer: Path | None = None
) -> AsyncIterator[Arena]:
    """Starts a stack in which every service reaches the broker through a proxy of its own.

    Args:
        settings: the settings of the stack and of its model.
        clock: the clock inside the block of which this runs, if it can be wrong.
        others: the settings of further models.
        newer: folder of the package with another wire version, if its services can join.
    """
    port, http = _free_ports(2)  # a service that starts again must be found where it was
    settings, *others = (
        msgspec.structs.replace(each, port=http, nats_port=port, nats_max_store=MAX_STORE)
        for each in (settings, *others)
    )
    services = (*PIPELINE, GATEWAY)
    programs = programs_of(settings, [GATEWAY])
    for model in (settings, *others):
        programs += programs_of(model, PIPELINE, several=bool(others))
    async with AsyncExitStack() as exits:
        proxies = {program.name: await exits.enter_async_context(Proxy(port)) for program in programs}
        urls = {name: proxy.url for name, proxy in proxies.items()}
        stack = await exits.enter_async_context(Stack(settings, services, urls, others=others))
        address = await stack.ready()
        user, password = stack.operator
        bus = await nats.connect(
            address.nats,
            name="chaos",
            user=user,
            password=password,
            inbox_prefix=subjects.service_inbox(SUPERVISOR),  # services answer its questions
        )
        exits.push_async_callback(bus.close)
        yield Arena(stack, proxies, address, bus, clock, newer)


def _runs(pid: int) -> bool:
    """Returns whether a child process has not ended."""
    return Path(f"/proc/{pid}").exists()


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _free_ports(count: int) -> list[int]:
    """Returns ports that nobody listens on."""
    with ExitStack() as exits:
        probes = [exits.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((HOST, 0))
        return [probe.getsockname()[1] for probe in probes]
