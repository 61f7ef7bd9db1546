"""The interface between a service and the process that runs it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pagewire.shared.bus import Bus
from pagewire.shared.config import Settings
from pagewire.shared.messages.heartbeat import Heartbeat


@dataclass(frozen=True, slots=True)
class Context:
    """What a service instance is created with. Logs and traces are global: see `pagewire.shared.telemetry`."""

    settings: Settings
    bus: Bus
    instance: str
    """Random id of this process."""
    announce: Callable[[], None]
    """Sends a heartbeat now: called whenever `ready` changes."""


class Service(Protocol):
    """One of the five services. `pagewire.shared.runtime` runs each in its own process, tests run several in one."""

    def heartbeat(self) -> Heartbeat:
        """Returns the current state of the service."""

    async def run(self) -> None:
        """Serves until cancelled, then finishes pending work and returns. Raises when it cannot serve."""
