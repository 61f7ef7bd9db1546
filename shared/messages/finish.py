"""Detokenizer to scheduler: sequences end before the device has ended them."""

from enum import IntEnum

from pagewire.shared.messages.codec import Wire


class FinishReason(IntEnum):
    """Why the detokenizer ends a sequence."""

    STOP_STRING = 0
    """The text has a stop string."""
    CANCELLED = 1
    """The client has cancelled the request."""
    DEADLINE = 2
    """`timeout_ms` has passed."""
    CLIENT_LOST = 3
    """No client reads the frames."""
    SUPERSEDED = 4
    """Another scheduler has attached the request since."""


class FinishSequences(Wire, frozen=True):
    """Ends sequences; sent to the scheduler that attached them. It is idempotent."""

    term: int
    """Term of the `Attach`."""
    sequences: bytes
    """Packed ids."""
    reason: int
    """A `FinishReason`."""


class FinishedSequences(Wire, frozen=True):
    """Reply to `FinishSequences`: only steps that are already running may still have the sequences."""

    known: int
    """Number of the sequences that were still running or waiting."""
