"""Detokenizer to scheduler: sequences whose results are no longer needed, although the device has not ended them."""

from enum import IntEnum

from pagewire.shared.messages.codec import Wire


class AbortReason(IntEnum):
    """Why the detokenizer aborts a sequence."""

    STOP_STRING = 0
    """The text has a stop string."""
    CANCELLED = 1
    """The client cancelled the request or has disconnected, or the request ended with an error."""
    DEADLINE = 2
    """`timeout_ms` has passed."""
    SUPERSEDED = 4
    """Another scheduler has attached the request since."""
    LOST_TOKENS = 5
    """Nothing is aborted: the detokenizer has missed tokens of the sequences, and asks to be attached again."""


class AbortSequences(Wire, frozen=True):
    """Aborts sequences; sent to the scheduler that attached them. It is idempotent."""

    term: int
    """Term of the `Attach`."""
    sequences: bytes
    """Packed ids."""
    reason: int
    """An `AbortReason`."""


class AbortedSequences(Wire, frozen=True):
    """Reply to `AbortSequences`: only steps that are already running may still have the sequences."""

    known: int
    """Number of the sequences that were still running or waiting."""
