"""One completion on its way through the executor."""

import math
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from pagewire.shared.messages.step import Finish
from pagewire.shared.messages.work import Sampling

if TYPE_CHECKING:
    from pagewire.services.scheduler.searches import Search


class State(Enum):
    """Where a sequence stands."""

    WAITING = auto()
    """It has neither slot nor blocks."""
    RUNNING = auto()
    """The executor has it in a slot."""
    PREEMPTED = auto()
    """A plan took its slot to make room; it waits again once the executor has answered that plan."""
    DROPPED = auto()
    """A plan took its slot for good; its blocks are free once the executor has answered that plan."""
    FINISHED = auto()
    """Nothing of it is left."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and blocks of one completion. The scheduler is the only one that changes it."""

    id: int
    """Within the term, as step outputs name it."""
    tokens: list[int]
    """Prompt, then what was generated."""
    prompt_tokens: int
    sampling: Sampling
    prompt_index: int = 0
    choice_index: int = 0
    priority: int = 0
    """Lower runs earlier."""
    arrival: int = 0
    """Order of arrival among equals."""
    arrived: float = 0.0
    """Unix time in seconds at which the queue took its request."""
    deadline: float = math.inf
    """Unix time in seconds after which nobody waits for it."""
    user: str = ""
    """Whose it is; empty: of those who do not say."""
    cache_salt: str = ""
    """It shares the blocks of sequences with the same one only."""
    trace: str = ""
    """`traceparent` that spans continue."""
    state: State = State.WAITING
    finish: Finish = Finish.NONE
    """How the executor ended it."""
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    """Entry i holds positions [i * block_size, (i + 1) * block_size)."""
    computed: int = 0
    """Leading positions whose KV a step output has confirmed."""
    served: int = 0
    """Steps of the term that had been reported when its last row was, or when it got its slot."""
    turn: int = -1
    """Steps of the term that had been reported when it was first held back for the prompts before it; -1: never."""
    short_at: int = 0
    """Number of tokens from which on its blocks do not last for the steps ahead."""
    cached: int | None = None
    """Positions that the first admission found computed; None before it."""
    search: "Search | None" = None
    """Whose beam it is, if it is one."""
    beam: int = 0
    """Which of them."""
    halt: int = 0
    """Of a beam: positions that it computes in this round."""
    reported: bool = False
    """It is a beam, has computed these, and waits for the others: its blocks and its slot are at rest."""

    @property
    def last_position(self) -> int:
        """Positions that can ever be written: the last token is sampled, and never fed."""
        return self.halt or self.prompt_tokens + self.sampling.max_tokens - 1
