"""Runs the services under clients that always have a request open, and finds their processes and counters."""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

from pagewire import AsyncClient
from pagewire.embedded.stack import PIPELINE, Stack
from pagewire.shared.bus import nats
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.process.discovery import ask
from pagewire.shared.settings.config import Settings

Talk = Callable[[AsyncClient, int], Coroutine[None, None, None]]
"""Sends the requests of the client with a given number, one after the other without end."""


async def counters(url: str) -> list[dict[str, float]]:
    """Returns the counters of each executor, in the order of their instances."""
    bus = await nats.connect(url, name="bench", inbox_prefix="_INBOX")
    try:
        replies = await ask(bus, "executor")
    finally:
        await bus.close()
    return [
        {name[5:]: float(value) for name, value in stats.metadata.items() if name.startswith("load.")}
        for stats in replies
    ]


def processes() -> Iterator[tuple[str, Path]]:
    """Yields the name and the folder in /proc of each process that this one has started.

    Services have their own names; a process of Python that is no service is `client`.
    """
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[1]) == os.getpid():
            services = (word.rpartition(".")[2] for word in command if word.startswith("pagewire.services."))
            name = next(services, Path(command[0]).name)
            yield "client" if name.startswith("python") else name, folder


def resident(service: str) -> float:
    """Returns the resident memory of a service that this process has started, in MB."""
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"pagewire.services.{service}".encode() in (folder / "cmdline").read_bytes():
                status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
                if int(status["PPid"]) == os.getpid():
                    return int(status["VmRSS"].split()[0]) * 1024 / 1e6
        except OSError:
            continue  # the process has ended
    raise ConfigurationError(f"no {service} is running")


def difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Returns how much each counter has grown."""
    return {name: after[name] - before[name] for name in before}


async def closed_loop(
    settings: Settings, talk: Talk, clients: int, warm_up: float, seconds: float
) -> tuple[float, list[dict[str, float]]]:
    """Returns the seconds that were counted, and what each executor counted in them.

    Nothing is counted within the first `warm_up` seconds.
    """
    async with Stack(settings, PIPELINE) as stack, asyncio.TaskGroup() as tasks:
        url = (await stack.ready()).nats
        async with AsyncClient(url) as client:
            talking = [tasks.create_task(talk(client, number)) for number in range(clients)]
            try:
                await asyncio.sleep(warm_up)
                before, began = await counters(url), time.monotonic()
                await asyncio.sleep(seconds)
                after, ended = await counters(url), time.monotonic()
            finally:
                for task in talking:
                    task.cancel()
                await asyncio.wait(talking)
    return ended - began, [difference(*pair) for pair in zip(after, before, strict=True)]
