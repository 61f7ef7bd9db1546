"""Shows every service instance with its state and load; exit code 1 unless every service is ready."""

import argparse
import asyncio
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.live import Live
from rich.text import Text

from pagewire.commands import session
from pagewire.commands.stack_at_port import at_port
from pagewire.embedded.programs import GATEWAY, PIPELINE, replicas_of
from pagewire.shared import subjects
from pagewire.shared.bus import Bus, nats
from pagewire.shared.errors import BusError, ConfigurationError
from pagewire.shared.messages.heartbeat import MEMORY, UNLOADED
from pagewire.shared.process.discovery import Stats, ask
from pagewire.shared.security import credentials
from pagewire.shared.security.permissions import ROLES
from pagewire.shared.settings import flags
from pagewire.shared.settings.config import Settings, nats_urls

SILENT = 3
"""Exit code if the broker answers and no instance of the named service does."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the service and all settings."""
    text = f"show only this service; exit code 0 if an instance is ready, {SILENT} if none answers"
    parser.add_argument("--service", metavar="NAME", help=text)
    text = "only instances on this host, which is the container that the command runs in"
    parser.add_argument("--here", action="store_true", help=text)
    text = "exit code 0 if an instance answers, ready or not, and while the broker does not; needs --service"
    parser.add_argument("--alive", action="store_true", help=text)
    text = "show the table until it is interrupted, and again every so many seconds (default: 1)"
    parser.add_argument("--watch", nargs="?", type=float, const=1.0, metavar="SECONDS", help=text)
    flags.add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints one line per service instance."""
    settings = session.quiet(flags.read_settings(arguments))
    if arguments.service is not None and not subjects.is_token(arguments.service):
        raise ConfigurationError(f"{arguments.service!r} cannot be a service: give {', '.join((*PIPELINE, GATEWAY))}")
    if arguments.alive and arguments.watch is not None:
        raise ConfigurationError("--alive answers once, and --watch goes on: give one of them")
    if arguments.alive:
        if arguments.service is None:
            raise ConfigurationError("--alive is about one service: give --service NAME")
        return session.run(_alive(settings, arguments.service, here=arguments.here), settings)
    status = _status(settings, arguments.service, arguments.watch, here=arguments.here)
    return session.run(status, settings, until_stopped=arguments.watch is not None)


async def _status(settings: Settings, service: str | None, every: float | None, *, here: bool) -> int:
    bus = await _connect(await at_port(settings), service)
    try:
        if every is not None:
            await _watch(bus, service, settings, max(every, 0.1), here=here)
        instances = await _ask(bus, service, here=here)
    finally:
        await bus.close()
    lines, missing = report(instances, service, settings)
    print("\n".join(lines))
    if service is not None and not instances:
        return SILENT
    return 1 if missing else 0


async def _alive(settings: Settings, service: str, *, here: bool) -> int:
    """Returns 1 if the broker answers and the service does not."""
    try:
        return 1 if await _status(settings, service, None, here=here) == SILENT else 0
    except BusError as error:
        print(f"nothing is known of {service}: {error}")
        return 0


async def _ask(bus: Bus, service: str | None, *, here: bool) -> list[Stats]:
    instances = await ask(bus, service)
    return [stats for stats in instances if not here or stats.metadata.get("host") == socket.gethostname()]


async def _watch(bus: Bus, service: str | None, settings: Settings, every: float, *, here: bool) -> None:
    """Draws the table in place, until cancelled."""
    with Live(auto_refresh=False) as live:
        while True:
            lines, _ = report(await _ask(bus, service, here=here), service, settings)
            live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
            await asyncio.sleep(every)


def report(instances: list[Stats], service: str | None, settings: Settings) -> tuple[list[str], bool]:
    """Returns the lines of a table and of problems, and whether a service is missing."""
    lines = table(instances)
    models = by_model(instances) if service is None else {"": instances}
    missing = {model: _missing(replies, service, settings) for model, replies in models.items()}
    gateways = [stats for stats in instances if stats.name == f"pagewire-{GATEWAY}"]
    if service is None and gateways and not any(stats.metadata.get("ready") == "true" for stats in gateways):
        missing[""] = [*missing.get("", ()), GATEWAY]  # it is no model's
    if service is None and instances:
        lines = [*columns(summary(model, models[model], bool(missing[model])) for model in models), "", *lines]
    lines += problems(instances)
    for model, names in missing.items():
        if names:
            of_model = f"{model}: " if model and len(models) > 1 else ""
            lines.append(f"not ready: {of_model}{', '.join(names)}")
    return lines, any(missing.values())


def problems(instances: list[Stats]) -> list[str]:
    """Returns a line for each reason for which requests cannot be served, with the services that report it."""
    reporters: dict[str, set[str]] = {}
    for stats in instances:
        if problem := stats.metadata.get("problem", ""):
            reporters.setdefault(problem, set()).add(stats.name.removeprefix("pagewire-"))
    return [f"{', '.join(sorted(names))}: {problem}" for problem, names in reporters.items()]


def by_model(instances: list[Stats]) -> dict[str, list[Stats]]:
    """Returns the instances that serve each model; without any, those of the model with the empty name."""
    models = {stats.metadata.get("model", "") for stats in instances if stats.name != "pagewire-gateway"}
    return {
        model: [stats for stats in instances if stats.metadata.get("model", "") == model] for model in sorted(models)
    } or {"": instances}


def _missing(instances: list[Stats], service: str | None, settings: Settings) -> list[str]:
    """Returns the services of which a model has fewer ready instances than it needs."""
    expected = {service: 1} if service else {name: replicas_of(name, settings) for name in PIPELINE}
    if _is_unloaded(instances) and service is None:
        expected |= {"executor": 0, "scheduler": 0}
    ready = Counter(stats.name for stats in instances if stats.metadata.get("ready") == "true")
    return [
        name if count == 1 else f"{name} ({ready[f'pagewire-{name}']} of {count})"
        for name, count in expected.items()
        if ready[f"pagewire-{name}"] < count
    ]


class Summary(NamedTuple):
    """The line of a model; its fields are the columns."""

    model: str
    state: str
    replicas: str
    """Executors that are ready."""
    services: str
    """Processes of each service."""
    memory: str
    """Bytes that all processes hold."""
    running: str
    waiting: str


def summary(model: str, instances: list[Stats], lacks: bool) -> Summary:
    """Returns the line of a model, from its instances and whether it lacks a service."""
    counts = Counter(stats.name.removeprefix("pagewire-") for stats in instances)
    services = " ".join(f"{name}={counts[name]}" for name in sorted(counts))
    ready = sum(stats.name == "pagewire-executor" and stats.metadata.get("ready") == "true" for stats in instances)
    running = _sum(instances, "scheduler", "requests") - _sum(instances, "scheduler", "queued")
    waiting = max((_figure(stats, "queued") for stats in instances if stats.name == "pagewire-tokenizer"), default=0.0)
    memory = sum(_figure(stats, MEMORY) for stats in instances)
    state = "not ready" if lacks else "unloaded" if _is_unloaded(instances) else "ready"
    return Summary(model, state, str(ready), services, f"{memory / 1e9:.2f}GB", f"{running:.0f}", f"{waiting:.0f}")


def _is_unloaded(instances: list[Stats]) -> bool:
    """Returns whether a model is unloaded until the next request."""
    return any(_figure(stats, UNLOADED) for stats in instances)


def _sum(instances: list[Stats], service: str, name: str) -> float:
    return sum(_figure(stats, name) for stats in instances if stats.name == f"pagewire-{service}")


def _figure(stats: Stats, name: str) -> float:
    """Returns a figure of an instance's load."""
    return float(stats.metadata.get(f"load.{name}", 0.0))


async def _connect(settings: Settings, service: str | None) -> Bus:
    """Connects as the service in the probe of its container, else as a client."""
    if service in ROLES and (settings.nats_password or settings.nats_secrets):
        user, password = credentials.of_service(settings, service)
        inbox_prefix = subjects.service_inbox(service)
    else:
        user, password = credentials.of_command(settings)
        inbox_prefix = subjects.client_inbox(settings.tenant)
    return await nats.connect(
        nats_urls(settings),
        name="status",
        user=user,
        password=password,
        inbox_prefix=inbox_prefix,
        connect_timeout=session.CONNECT_TIMEOUT,
        tls=credentials.tls(settings),
    )


def table(instances: list[Stats]) -> list[str]:
    """Returns the lines of the table of instances."""
    rows = [("service", "instance", "state", "model", "load")]
    for stats in instances:
        details: dict[str, Any] = stats.metadata
        state = next((state for state in ("draining", "ready") if details.get(state) == "true"), "not ready")
        load = " ".join(f"{key[5:]}={value}" for key, value in sorted(details.items()) if key.startswith("load."))
        name = stats.name.removeprefix("pagewire-")
        rows.append((name, stats.id, state, str(details.get("model", "")), load))
    return aligned(rows)


def columns(summaries: Iterable[Summary]) -> list[str]:
    """Returns the lines of the table of models."""
    return aligned([Summary._fields, *summaries])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a line for each row, with columns as wide as their widest cell.

    >>> aligned([("a", "b"), ("long", "c")])
    ['a     b', 'long  c']
    """
    longest = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(length) for cell, length in zip(row, longest, strict=True)).rstrip() for row in rows]
