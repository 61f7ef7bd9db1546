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
    """Id of the sequence within the term, which step outputs use."""
    tokens: list[int]
    """Ids of the prompt, then of the generated tokens."""
    num_prompt_tokens: int
    sampling: Sampling
    prompt_index: int = 0
    choice_index: int = 0
    priority: int = 0
    """Sequences of a lower priority run earlier."""
    arrival_order: int = 0
    """Number of the request by arrival: it decides between sequences of equal priority and arrival time."""
    arrival_time: float = 0.0
    """Unix time in seconds at which the queue stored the request."""
    deadline: float = math.inf
    """Unix time in seconds after which nobody waits for the result."""
    user: str = ""
    """Name of the user who sent the request; empty: all users who give none."""
    cache_salt: str = ""
    """Salt of the prefix cache: blocks are shared only between sequences of equal salt."""
    adapter: str = ""
    """Hash of the content of its adapter; empty: none."""
    trace: str = ""
    """`traceparent` that spans continue; empty: none."""
    state: SequenceState = SequenceState.WAITING
    finish: Finish = Finish.NONE
    """Reason for which the executor ended the sequence."""
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    """Block table: entry i holds positions [i * block_size, (i + 1) * block_size), in one block per group of layers."""
    stamps: list[int] = field(default_factory=list)
    """Clock of the pool when each of `blocks` was allocated."""
    given_back: list[int] = field(default_factory=list)
    """Per group of layers with a window, the number of leading entries whose block the sequence holds no more."""
    num_reserved_blocks: int = 0
    """Blocks that the pool keeps for the rest of a prompt in progress."""
    num_computed_tokens: int = 0
    """Leading positions whose KV a step output has confirmed."""
    num_cached_tokens: int | None = None
    """Positions that the prefix cache held at the first admission; None before it."""
    last_step: int = 0
    """`Policy.num_steps` when the last part of a prompt in progress was reported, or when it got its slot."""
    delayed_since: int = -1
    """`Policy.num_steps` when prompts in progress first kept the sequence from its slot; -1: they never did."""
    row_tokens: int = 1
    """Tokens that a step may bring, by the most that one has brought; at most a block's worth."""
    passed_since: int = -1
    """`Policy.num_steps` when running adapters first kept the sequence from its slot; -1: they never did."""
    blocks_last_until: int = 0
    """Number of tokens up to which the blocks last for the steps ahead."""
    position_limit: int = 0
    """Positions after which the executor pauses the sequence, a beam, until all beams are there; 0: it runs on."""
    reported: list[ReportedLogprobs] = field(default_factory=list)
    """Log-probabilities that a beam search reports of each generated token; empty: none."""
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
        """Whether log-probabilities of the prompt are reported, all of which must be computed then.

        The first completion of a prompt reports them, until it has a token.
        """
        first = self.choice_index == 0 and len(self.tokens) == self.num_prompt_tokens
        return first and self.sampling.prompt_logprobs >= 0

    @property
    def caller_ids(self) -> tuple[int, ...]:
        """Ids under which the caller of the policy knows the sequence: its own, unless it serves other sequences."""
        return (self.id,)
