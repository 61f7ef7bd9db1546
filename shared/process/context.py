"""The interface between a service and the process that runs it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from pagewire.shared.bus import Bus
from pagewire.shared.messages.heartbeat import Heartbeat
from pagewire.shared.metrics.metric import Sample
from pagewire.shared.models import model_folder
from pagewire.shared.settings.config import Settings


class Drain(Enum):
    """The event that follows the drain of a service."""

    ALONE = auto()
    """Unknown: the process was told to end, and no supervisor watches it."""
    SUCCESSOR = auto()
    """The supervisor starts another instance at once, or as soon as this one has ended."""
    STOP = auto()
    """The whole stack ends. The supervisor ends this instance when the others have finished what was accepted."""


@dataclass(frozen=True, slots=True)
class Context:
    """The settings, bus and callbacks with which a service instance is created. Logs and traces are global."""

    settings: Settings
    bus: Bus
    instance: str
    """Random id of this process."""
    announce: Callable[[], None]
    """Sends a heartbeat now: called whenever `ready` changes."""
    follows: Callable[[], Drain] = lambda: Drain.ALONE
    """Returns what follows a drain."""

    @property
    def model(self) -> str:
        """Token of the served model in subjects."""
        return model_folder.served_token(self.settings)


class Service(Protocol):
    """One of the five services. `process.runtime` runs each in its own process, tests run several in one."""

    def heartbeat(self) -> Heartbeat:
        """Returns the current state of the service."""

    def metrics(self) -> Iterable[Sample]:
        """Returns the values of its metrics, as counted so far."""

    async def drain(self) -> None:
        """Finishes or hands over the service's work; returns when the service may end.

        Called at most once, while `run` serves or still starts. Cancelled after the setting `drain_timeout`.
        """

    async def run(self) -> None:
        """Serves until cancelled, then finishes pending work and returns. Raises when it cannot serve."""
