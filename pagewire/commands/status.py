"""Shows every service instance with its state and load; exit code 1 unless every service is ready."""

import argparse
from collections import Counter
from typing import Any

from pagewire.commands import session
from pagewire.embedded.stack import PIPELINE, replicas_of
from pagewire.shared import credentials, flags, subjects
from pagewire.shared.bus import Bus, nats
from pagewire.shared.config import Settings, nats_urls
from pagewire.shared.discovery import Stats, ask
from pagewire.shared.messages.heartbeat import STORE_REFUSES
from pagewire.shared.permissions import ROLES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the service and all settings."""
    parser.add_argument("--service", metavar="NAME", help="show only this service; exit code 0 if an instance is ready")
    flags.add_settings(parser)


def run(given: argparse.Namespace) -> int:
    """Prints one line per service instance."""
    settings = session.quiet(flags.read_settings(given))
    return session.run(_status(settings, given.service), settings)


async def _status(settings: Settings, service: str | None) -> int:
    bus = await _connect(settings, service)
    try:
        found = await ask(bus, service)
    finally:
        await bus.close()
    print("\n".join(table(found)))
    wanted = {service: 1} if service else {name: replicas_of(name, settings) for name in PIPELINE}
    ready = Counter(stats.name for stats in found if stats.metadata.get("ready") == "true")
    missing = [
        name if count == 1 else f"{name} ({ready[f'pagewire-{name}']} of {count})"
        for name, count in wanted.items()
        if ready[f"pagewire-{name}"] < count
    ]
    if any(stats.metadata.get(f"load.{STORE_REFUSES}") == "1" for stats in found):
        print("the store takes no work: look at the disk and the limits of the NATS server")
    if missing:
        print(f"not ready: {', '.join(missing)}")
    return 1 if missing else 0


async def _connect(settings: Settings, service: str | None) -> Bus:
    """Connects as the service itself where this is the probe of its container, and else as a client."""
    if service in ROLES and (settings.nats_password or settings.nats_secrets):
        user, password = credentials.of_service(settings, service)
        inbox_prefix = subjects.service_inbox(service)
    else:
        user, password = credentials.of_client(settings.tenant, settings.api_key)
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


def table(found: list[Stats]) -> list[str]:
    """Returns the lines of a table for the terminal."""
    lines = [f"{'service':<14}{'instance':<14}{'state':<10}{'model':<16}load"]
    for stats in found:
        details: dict[str, Any] = stats.metadata
        state = next((state for state in ("draining", "ready") if details.get(state) == "true"), "not ready")
        load = " ".join(f"{key[5:]}={value}" for key, value in sorted(details.items()) if key.startswith("load."))
        name = stats.name.removeprefix("pagewire-")
        lines.append(f"{name:<14}{stats.id:<14}{state:<10}{details.get('model', ''):<16}{load}")
    return lines
