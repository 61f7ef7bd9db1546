"""Finds the processes of a stack, and its counters."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pagewire.shared.bus import nats
from pagewire.shared.process.discovery import ask


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


def processes(parent: int | None = None) -> Iterator[tuple[str, Path]]:
    """Yields the name and the folder in /proc of each process that `parent` has started; None: this process.

    Services have their own names; a process of Python that is no service is `client`.
    """
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[1]) == (parent or os.getpid()):
            services = (word.rpartition(".")[2] for word in command if word.startswith("pagewire.services."))
            name = next(services, Path(command[0]).name)
            yield "client" if name.startswith("python") else name, folder


def resident_bytes() -> dict[str, int]:
    """Returns the resident memory, in bytes, of the processes that this one has started, by name."""
    sizes: dict[str, int] = {}
    for name, folder in processes():
        with suppress(OSError):  # it has ended meanwhile
            pages = int((folder / "statm").read_text().split()[1])
            sizes[name] = sizes.get(name, 0) + pages * os.sysconf("SC_PAGE_SIZE")
    return sizes


def cpu_seconds(parent: int | None = None) -> dict[str, float]:
    """Returns the CPU seconds of the processes that `parent` has started, by name; None: this process."""
    spent: dict[str, float] = {}
    for name, folder in processes(parent):
        with suppress(OSError):  # it has ended meanwhile
            ticks = map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:13])
            spent[name] = spent.get(name, 0.0) + sum(ticks) / os.sysconf("SC_CLK_TCK")
    return spent


def difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Returns how much each counter has grown."""
    return {name: after[name] - before[name] for name in before}
