"""What every service is given when it starts, and what it gives in return."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pagewire.shared.bus import Bus
from pagewire.shared.config import Settings
from pagewire.shared.messages.heartbeat import Heartbeat


@dataclass(frozen=True, slots=True)
class Context:
    """The surroundings of one service instance. Logs and traces are global: see `pagewire.shared.telemetry`."""

    settings: Settings
    bus: Bus
    instance: str
    """Random id of this process."""
    announce: Callable[[], None]
    """Sends a heartbeat now: called whenever `ready` changes."""


class Service(Protocol):
    """One of the five services. `pagewire.shared.runtime` runs it in a process, tests run it beside others in one."""

    def heartbeat(self) -> Heartbeat:
        """Its state at this moment."""

    async def run(self) -> None:
        """Serves until cancelled; then it finishes what it owes and returns. Raises when it cannot serve."""
