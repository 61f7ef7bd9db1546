"""One completion on its way through the executor."""

import math
from dataclasses import dataclass, field
from enum import Enum, auto

from pagewire.shared.messages.done import ReportedLogprobs
from pagewire.shared.messages.step import Finish
from pagewire.shared.messages.work import Sampling


class SequenceState(Enum):
    """Where a sequence stands. Each arrow is a method of `SequenceTable`.

              allocate            finish
    WAITING ────────────▶ RUNNING ──────────▶ FINISHED
     │  ▲                  │   │                ▲  ▲
     │  │ free     preempt │   │ abort          │  │
     │  │                  ▼   │                │  │
     │  └───────── PREEMPTED   │                │  │
     │   abort, finish │       │                │  │
     │                 ▼       ▼      free      │  │
     │                 ABORTED ─────────────────┘  │
     └─────────────────── abort ───────────────────┘

    A preempted sequence that is paused at its position limit has nothing left to run: `free` makes it FINISHED.
    """

    WAITING = auto()
    """The sequence has neither a slot nor blocks."""
    RUNNING = auto()
    """The executor has the sequence in a slot."""
    PREEMPTED = auto()
    """A plan takes the slot to make room. The sequence waits again once the executor has answered that plan."""
    ABORTED = auto()
    """A plan takes the slot for good. The blocks are free once the executor has answered that plan."""
    FINISHED = auto()
    """The sequence has ended, and its slot and blocks are free."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, slot and blocks of one completion. Only the scheduler changes them."""

    id: int
    """Within the term, as step outputs name the sequence."""
    tokens: list[int]
    """Prompt, then the generated tokens."""
    num_prompt_tokens: int
    sampling: Sampling
    prompt_index: int = 0
    choice_index: int = 0
    priority: int = 0
    """Lower runs earlier."""
    arrival_order: int = 0
    """Decides between sequences of equal priority and arrival time."""
    arrival_time: float = 0.0
    """Unix time in seconds at which the queue stored the request."""
    deadline: float = math.inf
    """Unix time in seconds after which nobody waits for the result."""
    user: str = ""
    """Who sent the request; empty: all users who do not say."""
    cache_salt: str = ""
    """Blocks are shared only between sequences of the same salt."""
    trace: str = ""
    """`traceparent` that spans continue."""
    state: SequenceState = SequenceState.WAITING
    finish: Finish = Finish.NONE
    """Why the executor ended the sequence."""
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    """Entry i holds positions [i * block_size, (i + 1) * block_size). It has one block of each group of layers."""
    stamps: list[int] = field(default_factory=list)
    """When each of `blocks` was allocated, by the clock of the pool."""
    given_back: list[int] = field(default_factory=list)
    """Per group of layers with a window, the number of leading entries whose block the sequence holds no more."""
    num_reserved_blocks: int = 0
    """Blocks that the pool keeps for the rest of a prompt in progress."""
    num_computed_tokens: int = 0
    """Leading positions whose KV a step output has confirmed."""
    num_cached_tokens: int | None = None
    """Positions that the prefix cache held at the first admission; None before it."""
    last_step: int = 0
    """`Policy.num_steps` when the last row of the sequence was reported, or when it got its slot."""
    delayed_since: int = -1
    """`Policy.num_steps` when prompts in progress first kept the sequence from its slot; -1: they never did."""
    allocate_at: int = 0
    """Number of tokens from which on the blocks do not last for the steps ahead."""
    position_limit: int = 0
    """Positions after which the executor pauses the sequence; 0: none. Others of its request wait for it there."""
    reported: list[ReportedLogprobs] = field(default_factory=list)
    """What a beam search reports of each generated token, if it is asked to."""
    cumulative_logprob: float = 0.0
    """Sum of the log-probabilities of the tokens that a beam search has found."""
    at_limit: bool = False
    """Whether the sequence is paused at its limit. No step writes to its blocks then, so all of it can be freed."""

    @property
    def last_position(self) -> int:
        """Positions that can ever be written: the last token is sampled, and never fed."""
        return self.position_limit or self.num_prompt_tokens + self.sampling.max_tokens - 1

    @property
    def reports_prompt(self) -> bool:
        """Whether the executor reports log-probabilities of the prompt, and must therefore compute all of it."""
        wanted = self.sampling.prompt_logprobs >= 0 and self.choice_index == 0
        return wanted and len(self.tokens) == self.num_prompt_tokens

    @property
    def caller_ids(self) -> tuple[int, ...]:
        """Ids under which the caller of the policy knows the sequence: its own, unless it serves other sequences."""
        return (self.id,)
