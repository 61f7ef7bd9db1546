"""Replaces each service by that of another version and back, under load, as an operator does who has no supervisor.

If both versions have one wire version, one service after the other is replaced: its successor starts, and the old one
gets SIGTERM when that is ready. Otherwise all services of the other version start beside the old ones, and these get
SIGTERM when all are ready. Each request must end with the text of an undisturbed run; one that is refused before it is
accepted is sent again. The exit code is 1 if a request was lost, duplicated, reordered, wrong or hung.
"""

import argparse
import asyncio
import random
import signal
import sys
import time
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path

from pagewire.bench._chaos.checks import EXACT, Seen, judge
from pagewire.bench._chaos.readers import open_reader
from pagewire.bench._chaos.requests import HTTP, NATS, Request, mixture
from pagewire.bench._chaos.trial import answers
from pagewire.bench._common.output import add_output, markdown, write
from pagewire.embedded.address import Address
from pagewire.embedded.broker import Broker
from pagewire.embedded.stack import SUPERVISOR
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, nats
from pagewire.shared.errors import BusError, Unavailable
from pagewire.shared.process.discovery import Stats, ask
from pagewire.shared.settings.config import Settings
from pagewire.shared.telemetry import logs
from tools.experiments._common import checkouts
from tools.experiments.other_servers.vllm.servers import free_port

SERVICES = ("detokenizer", "executor", "scheduler", "tokenizer", "gateway")
"""The order in which services are replaced. Where all are beside the old ones, these end in the reverse order: first
those that accept requests."""
START_TIMEOUT = 180.0
"""Seconds within which a service must be ready; the first start of a version compiles its kernels."""
END_TIMEOUT = 90.0
"""Seconds within which a service must end after SIGTERM."""
REST = 1.0
"""Seconds between two replacements."""
TOKENS = 48
"""Tokens of an answer, at most."""
SEED = 1


@dataclass
class Change:
    """Results of the change of all services to another version."""

    name: str
    beside: bool
    """Whether all new services were beside the old ones."""
    seconds: float = 0.0
    requests: int = 0
    refused: int = 0
    """Times that a request was refused before it was accepted, and sent again."""
    failures: list[str] = field(default_factory=list)
    """Descriptions of all requests that did not end exactly, or were refused after they had been accepted."""


@dataclass(frozen=True)
class Service:
    """A running service."""

    name: str
    instance: str
    process: Process
    port: int
    """Port that it listens on, if it is a gateway."""

    async def stop(self) -> None:
        """Sends SIGTERM, and returns when the process has ended.

        Raises:
            Unavailable: it does not end.
        """
        self.process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(END_TIMEOUT):
                await self.process.wait()
        except TimeoutError:
            raise Unavailable(f"the {self.name} has not ended {END_TIMEOUT:.0f} s after SIGTERM") from None


class Fleet:
    """The services of a model on one broker, without a supervisor.

    Attributes:
        bus: connection with all rights.
    """

    def __init__(self, broker: Broker, bus: Bus, device: str) -> None:
        self.bus = bus
        self._broker = broker
        self._device = device
        self._services: dict[str, Service] = {}

    @property
    def address(self) -> Address:
        """Address of the broker and of the gateway that is to be used now."""
        return Address(self._broker.url, f"http://127.0.0.1:{self._services['gateway'].port}")

    async def start(self, checkout: Path, names: Sequence[str] = SERVICES) -> dict[str, Service]:
        """Starts services of a version side by side; returns them once they are ready."""
        return {service.name: service for service in await asyncio.gather(*(self._start(n, checkout) for n in names))}

    async def replace(self, services: Mapping[str, Service]) -> None:
        """Uses these services from now on, and stops those before them."""
        before = {name: self._services[name] for name in services if name in self._services}
        self._services |= services
        for name in reversed(SERVICES):
            if name in before:
                await before[name].stop()

    def kill(self) -> None:
        """Ends all processes at once."""
        for service in self._services.values():
            with suppress(ProcessLookupError):
                service.process.kill()

    async def _start(self, name: str, checkout: Path) -> Service:
        port = free_port() if name == "gateway" else 0
        password = self._broker.passwords[name]
        options = checkouts.options(
            checkout,
            model="bundled",
            device=self._device,
            num_kv_blocks=1024,
            seed=SEED,
            port=port,
            nats_url=self._broker.url,
            nats_user=name,
            nats_password=password,
            log_level="error",
        )
        known = {stats.id for stats in await self._ask(name)}
        command = checkouts.command(f"pagewire.services.{name}")
        process = await asyncio.create_subprocess_exec(*command, **options)
        try:
            async with asyncio.timeout(START_TIMEOUT):
                while process.returncode is None:
                    for stats in await self._ask(name):
                        if stats.id not in known and _serves(stats):
                            return Service(name, stats.id, process, port)
        except TimeoutError:
            pass
        process.kill()
        raise Unavailable(f"the {name} of {checkout} has not become ready: see its log")

    async def _ask(self, name: str) -> list[Stats]:
        with suppress(BusError):
            return await ask(self.bus, name)
        return []


def main(arguments: Sequence[str]) -> int:
    """Prints a table and all failures, and writes `--output`."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments rolling_change", description=__doc__)
    parser.add_argument("other", type=Path, metavar="CHECKOUT", help="folder of the other version")
    parser.add_argument("--rounds", type=int, default=1, help="times that all services change there and back")
    parser.add_argument("--clients", type=int, default=8, help="requests at a time, half of them over HTTP")
    parser.add_argument("--device", default="cpu")
    add_output(parser)
    options = parser.parse_args(arguments)
    logs.configure(Settings(log_level="error"), service="bench")
    changes = asyncio.run(measure(options.other, options.rounds, options.clients, options.device))
    raw = [asdict(change) for change in changes]
    print("\n".join(table(raw)))
    for change in changes:
        print("\n".join(f"{change.name}: {text}" for text in change.failures))
    write(options.output, parser.prog, arguments, runs=raw)
    return int(any(change.failures for change in changes))


def table(changes: Sequence[Mapping[str, object]]) -> list[str]:
    """Returns a line per change, in Markdown."""
    lines = []
    for raw in changes:
        failures = raw["failures"]
        assert isinstance(failures, list)
        order = "all beside the old ones" if raw["beside"] else "one by one"
        lines.append(
            f"{raw['name']} | {order} | {raw['seconds']:.0f} | {raw['requests']} | {raw['refused']} | {len(failures)}"
        )
    return markdown("change | services | s | requests | refused, sent again | lost or wrong", lines)


async def measure(other: Path, rounds: int, clients: int, device: str) -> list[Change]:
    """Changes all services so often to the other version and back, under so many clients."""
    changes: list[Change] = []
    beside = not await _share_wire_version(checkouts.HERE, other)
    async with Broker(port=0) as broker:
        bus = await nats.connect(
            broker.url,
            name="operator",
            user=broker.user,
            password=broker.password,
            inbox_prefix=subjects.service_inbox(SUPERVISOR),  # services answer its questions
        )
        fleet = Fleet(broker, bus, device)
        try:
            await fleet.replace(await fleet.start(checkouts.HERE))
            requests = mixture(SEED, TOKENS)
            expected = await answers(fleet.address, requests)
            for _ in range(rounds):
                for name, checkout in (("to the other version", other), ("back", checkouts.HERE)):
                    change = Change(name, beside)
                    changes.append(change)
                    await _under_load(fleet, checkout, change, requests, expected, clients)
        finally:
            fleet.kill()
            await bus.close()
    return changes


async def _under_load(
    fleet: Fleet,
    checkout: Path,
    change: Change,
    requests: Sequence[Request],
    expected: Mapping[int, Seen],
    clients: int,
) -> None:
    """Changes all services while clients send requests, and judges these."""
    ending = asyncio.Event()
    began = time.monotonic()
    ended: list[tuple[Request, Seen]] = []
    async with asyncio.TaskGroup() as tasks:
        for number, transport in zip(range(clients), cycle((NATS, HTTP)), strict=False):
            theirs = [request for request in requests if request.transport == transport]
            rng = random.Random(f"client {change.name} {number}")
            tasks.create_task(_talk(lambda: fleet.address, theirs, rng, ended, ending))
        try:
            await asyncio.sleep(REST)
            for names in [SERVICES] if change.beside else [(name,) for name in SERVICES]:
                await fleet.replace(await fleet.start(checkout, names))
                print(f"{time.monotonic() - began:6.1f} s  {change.name}: {', '.join(names)}", file=sys.stderr)
                await asyncio.sleep(REST)
        finally:
            ending.set()
    change.seconds, change.requests = time.monotonic() - began, len(ended)
    for request, seen in ended:
        verdict = judge(request, expected[request.number], seen)
        change.refused += sum(not refusal.accepted for refusal in seen.refusals)
        if verdict.outcome != EXACT:
            change.failures.append(f"{verdict.outcome}: {request}: {verdict.reason}")
        change.failures += [f"{request} was accepted and refused: {r.message}" for r in seen.refusals if r.accepted]
    reasons = Counter(refusal.message[:120] for _, seen in ended for refusal in seen.refusals)
    for reason, count in reasons.most_common():
        print(f"refused {count} times: {reason}", file=sys.stderr)


async def _talk(
    address: Callable[[], Address],
    requests: Sequence[Request],
    rng: random.Random,
    ended: list[tuple[Request, Seen]],
    ending: asyncio.Event,
) -> None:
    """Sends requests one after the other, each to the gateway of that moment, until the change has ended."""
    while not ending.is_set():
        request, seen = rng.choice(requests), Seen()
        reader = await open_reader(request.transport, address())
        try:
            await reader.read(request, seen)
        finally:
            await reader.close()
        ended.append((request, seen))


def _serves(stats: Stats) -> bool:
    """Returns whether an instance is ready, or a scheduler that waits for an executor, as a successor does."""
    return stats.metadata.get("ready") == "true" or stats.metadata.get("load.claiming") == "1"


async def _share_wire_version(*folders: Path) -> bool:
    """Returns whether two versions read each other's messages."""
    code = "from pagewire.shared.wire_version import WIRE_VERSION; print(WIRE_VERSION)"
    versions = set()
    for folder in folders:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-c", code, stdout=asyncio.subprocess.PIPE, **checkouts.options(folder)
        )
        versions.add((await process.communicate())[0])
    return len(versions) == 1
