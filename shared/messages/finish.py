"""Detokenizer to scheduler: a sequence ends before the device's own stop."""

from enum import IntEnum

from pagewire.shared.messages.codec import Wire


class FinishReason(IntEnum):
    """Why the detokenizer ends a sequence."""

    STOP_STRING = 0
    """Its text holds a stop string."""
    CANCELLED = 1
    """The client asked."""
    DEADLINE = 2
    """`timeout_ms` has passed."""
    CLIENT_LOST = 3
    """Nobody reads the frames."""
    SUPERSEDED = 4
    """Another scheduler has attached the request since."""


class FinishSequences(Wire, frozen=True):
    """Ends sequences. Asked of the scheduler that attached them; repeating it is harmless."""

    term: int
    """Of the attachment."""
    sequences: bytes
    """Packed ids."""
    reason: int
    """A `FinishReason`."""


class FinishedSequences(Wire, frozen=True):
    """The scheduler has dropped them: no step after those that are running will carry them."""

    known: int
    """How many of them were still running or waiting."""
