"""Detokenizer to scheduler: sequences that nobody needs any more, although the device has not ended them."""

from enum import IntEnum

from pagewire.shared.messages.codec import Wire


class AbortReason(IntEnum):
    """Why the detokenizer aborts a sequence."""

    STOP_STRING = 0
    """Its text holds a stop string."""
    CANCELLED = 1
    """The client cancelled the request or has disconnected, or the request ended with an error."""
    DEADLINE = 2
    """`timeout_ms` has passed."""
    SUPERSEDED = 4
    """Another scheduler has attached the request since."""


class AbortSequences(Wire, frozen=True):
    """Aborts sequences. Asked of the scheduler that attached them; repeating it is harmless."""

    term: int
    """Of the attachment."""
    sequences: bytes
    """Packed ids."""
    reason: int
    """An `AbortReason`."""


class AbortedSequences(Wire, frozen=True):
    """The scheduler has aborted them: no step after those that are running will carry them."""

    known: int
    """How many of them were still running or waiting."""
