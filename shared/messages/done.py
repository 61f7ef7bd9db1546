"""What ended in the last two minutes, so that no request is generated twice."""

from typing import Literal

from pagewire.shared.messages.codec import Wire


class DoneChoice(Wire, frozen=True):
    """One completion as its client saw it."""

    tokens: bytes
    """Packed ids."""
    texts: tuple[str, ...]
    """Text of each token's frame; joined, the text of the completion."""
    finish_reason: Literal["stop", "length", "cancelled"]
    """Why it ended."""
    stop_reason: str | int | None
    """What stopped it, as the client is told."""


class Done(Wire, frozen=True):
    """A request that has ended."""

    request_id: str
    """Key of the record."""
    digest: bytes
    """Fingerprint of the body, to tell a repetition from a conflict."""
    choices: tuple[DoneChoice, ...]
    """Empty when the request ended with an error."""
    prompt_tokens: int
    """For `usage`."""
    cached_tokens: int
    """For `usage`."""
    error: str
    """Name of the error that ended it; empty: none."""
    message: str
    """What the client was told of that error."""
