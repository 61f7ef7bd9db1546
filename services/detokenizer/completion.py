"""What a client is told of one completion."""

from dataclasses import dataclass, field
from typing import Literal

FinishName = Literal["stop", "length", "cancelled"]


@dataclass(slots=True, eq=False)
class Completion:
    """Every frame is a function of this, so that a frame that is made again is equal to the letter."""

    tokens: list[int] = field(default_factory=list)
    """Generated ids, up to and including the one that ended the completion."""
    texts: list[str] = field(default_factory=list)
    """Text of each token's frame. Joined, the text of the completion."""
    finish: FinishName | None = None
    """Why it ended; None while it goes on."""
    stop_reason: str | int | None = None
    """The stop string, or the id of a stop token that the client named."""
