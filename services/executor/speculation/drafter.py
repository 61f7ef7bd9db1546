"""The interface between the speculator and its drafters."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pagewire.services.executor.devices.protocol import Float64, Int64
from pagewire.shared.sampling_parameters import Record


class DraftRow(NamedTuple):
    """A row of a step that samples."""

    slot: int
    text: Int64
    """[N] all tokens of the sequence."""
    room: int
    """Tokens that may be drafted at most."""


class NewSequence(NamedTuple):
    """A sequence that is about to be drafted for."""

    sampling: Record
    """Its sampling parameters []."""
    known_tokens: int
    """Number of tokens that it begins with: its prompt and, after a preemption, what it had generated."""
    cache_salt: str = ""
    """Sequences with the same salt have the same tenant and the same adapter."""


class Draft(NamedTuple):
    """A guess of the next tokens of a text."""

    tokens: list[int]
    shares: list[float]
    """For each token, the share of the earlier places that went on with it, among those that agree so far. `Acceptance`
    has learnt how often tokens after such a match are right."""
    match_length: int
    """Number of tokens at the end of the text that an earlier place has too: the longer, the surer."""


NO_DRAFT = Draft([], [], 0)


class Drafter(Protocol):
    """Guesses the next tokens of texts. A wrong guess costs time and never changes a text."""

    max_length: int | None = None
    """Tokens of a text with its drafts, at most; None: any number."""

    def begin(self, slot: int, sequence: NewSequence) -> None:
        """Drafts for a new sequence in a slot. By default nothing is kept of it."""
        return

    def end(self, slot: int, text: Int64) -> None:
        """Drafts no more for the sequence in a slot, whose tokens are now `text` [N]."""
        return

    def seconds(self, rows: int, max_tokens: int) -> Float64 | None:
        """Returns the seconds [max_tokens + 1] that drafting 0 to `max_tokens` tokens for so many `rows` takes; None,
        as by default: next to no time."""
        return None

    def draft(self, rows: Sequence[DraftRow]) -> list[Draft]:
        """Returns at most `room` tokens for each row, which may follow its text."""
