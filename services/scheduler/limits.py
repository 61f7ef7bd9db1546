"""What bounds the sequences of one term."""

from dataclasses import dataclass

from pagewire.services.scheduler.sequence import Sequence
from pagewire.shared.messages.work import Sampling


@dataclass(frozen=True, slots=True)
class Limits:
    """What the executor offers and the settings ask for."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    """Slots."""
    budget: int
    """Tokens per step, at first."""
    window: int
    """Steps that the executor may run beyond the last one reported."""
    prefix_cache: bool = True
    itl_target_ms: float | None = None
    """Time of a step that the budget follows; None: one of the scheduler's own where the budget may grow, else none."""
    max_budget: int = 0
    """Tokens per step up to which the budget may grow; less than `budget`: it does not grow."""
    max_plan_bytes: int = 512 * 1024
    """Tokens of added slots in one plan, in bytes; the rest goes into the next plan."""
    max_candidates: int = 0
    """Likeliest tokens that a row can report; 0: there is no beam search."""

    @property
    def max_running(self) -> int:
        """Slots that may be in use: every step can decode them all and has a block's worth of prompt left over."""
        spare = min(self.block_size, self.budget // 2)
        return max(1, min(self.max_num_seqs, self.budget - spare))

    @property
    def watermark(self) -> int:
        """Blocks that admission leaves free, so that running sequences can grow before anyone is preempted."""
        return self.num_blocks // 100

    def blocks_for(self, positions: int) -> int:
        """Blocks that so many positions take."""
        return -(-positions // self.block_size)

    def fits(self, sequence: Sequence) -> bool:
        """Whether the pool could hold it alone, to its last token."""
        return self.blocks_for(sequence.last_position) <= self.num_blocks

    def obstacle(self, prompt_tokens: int, sampling: Sampling) -> str:
        """What stands in the way of a beam search; empty: nothing. All its beams must find room together."""
        width = sampling.beam_width
        if not self.max_candidates:
            return "beam_width: beam search is not built for this device yet: leave it out"
        if sampling.candidates > self.max_candidates:
            most = self.max_candidates
            return f"beam_width and stop tokens need {sampling.candidates} candidates, the device reports {most}"
        if width > self.max_running:
            return f"beam_width must be at most {self.max_running} here, not {width}: so many sequences run at a time"
        shared = prompt_tokens // self.block_size
        needed = shared + width * (self.blocks_for(prompt_tokens + sampling.max_tokens - 1) - shared)
        if needed > self.num_blocks:
            return f"{width} beams need {needed} KV blocks, there are {self.num_blocks}: ask for fewer beams or tokens"
        return ""
