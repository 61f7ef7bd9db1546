"""Gateway to supervisor: a fault that somebody has asked for in a demonstration."""

from enum import Enum

from pagewire.shared.messages.codec import Wire


class FaultKind(Enum):
    """The event that happens to a process."""

    KILL = "kill"
    """It ends at once, as by SIGKILL."""
    FREEZE = "freeze"
    """It stands still, until the watchdog kills it."""
    DRAIN = "drain"
    """It hands over its work and ends."""


class Fault(Wire, frozen=True):
    """A fault of one instance."""

    instance: str
    """Instance id of the process."""
    kind: FaultKind
    """Kind of the fault."""
