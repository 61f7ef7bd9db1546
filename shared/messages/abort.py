"""Detokenizer to scheduler: ends sequences that the device has not ended, or asks for their tokens again."""

from enum import IntEnum

from pagewire.shared.messages.codec import Wire


class AbortReason(IntEnum):
    """Why the detokenizer aborts a sequence."""

    STOP_STRING = 0
    """The text has reached a stop string."""
    CANCELLED = 1
    """The client cancelled the request or has disconnected, or the request ended with an error."""
    DEADLINE = 2
    """`timeout_ms` has passed."""
    SUPERSEDED = 4
    """Another scheduler has attached the request since."""
    LOST_TOKENS = 5
    """The detokenizer has missed tokens: the sequences go on, and the scheduler attaches the request again."""


class AbortSequences(Wire, frozen=True):
    """Aborts sequences at the scheduler that attached them. Sending it twice does no harm."""

    term: int
    """Term of the `Attach`."""
    sequences: bytes
    """Packed ids of the sequences."""
    reason: int
    """An `AbortReason`."""


class AbortedSequences(Wire, frozen=True):
    """Reply to `AbortSequences`: from here on, only steps that are in flight may still have the sequences."""

    known: int
    """Number of the sequences that were running or waiting until now."""
