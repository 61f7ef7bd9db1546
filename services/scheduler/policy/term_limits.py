"""The limits of the sequences of one term."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from pagewire.services.scheduler.policy.sequence import Sequence
from pagewire.shared.block_tables import LOOKAHEAD_STEPS, blocks_of, entries_of_window
from pagewire.shared.messages import unpack
from pagewire.shared.messages.plan import Claimed
from pagewire.shared.messages.work import Sampling
from pagewire.shared.settings.config import Settings

PLAN_SHARE = 0.5
"""Part of the broker's payload limit that the added slots of one plan may fill."""


@dataclass(frozen=True)
class TermLimits:
    """The offer of the executor, as far as the settings use it."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    """Number of slots."""
    budget: int
    """Tokens of a step, at first."""
    window: int
    """Steps that the executor may run beyond the last one reported."""
    prefix_cache: bool = True
    itl_target_ms: float | None = None
    """Step time that the budget follows; None: the scheduler's own target where the budget may grow, else none."""
    max_budget: int = 0
    """Tokens per step up to which the budget may grow; less than `budget`: the budget does not grow."""
    mixed_prompt_tokens: int = 0
    """Prompt tokens of a step that decodes too, where no step time is set and few prompts wait; 0: no such limit."""
    max_plan_bytes: int = 512 * 1024
    """Tokens of added slots in one plan, in bytes; the rest goes into the next plan."""
    max_candidates: int = 0
    """Likeliest tokens that a row can report; 0: there is no beam search."""
    windows: tuple[int, ...] = (0,)
    """Per group of layers, how many positions a query sees, its own included; 0: all."""
    max_loras: int = 1
    """Most adapters whose sequences run in one step."""

    @property
    def max_running(self) -> int:
        """Slots that may be in use: every step can decode them all and has a block's worth of prompt left over."""
        spare = min(self.block_size, self.budget // 2)
        return max(1, min(self.max_num_seqs, self.budget - spare))

    @property
    def watermark(self) -> int:
        """Blocks that admission leaves free, so that running sequences can grow before one is preempted."""
        return self.num_blocks // 100

    @cached_property  # asked for every row
    def lookahead(self) -> int:
        """Steps ahead for which a sequence is given blocks."""
        return min(self.window, LOOKAHEAD_STEPS)

    @property
    def cached_positions(self) -> int:
        """Positions whose KV the pool holds at most, in all layers; 0: it keeps no prefixes."""
        return self.num_blocks // len(self.windows) * self.block_size if self.prefix_cache else 0

    def entries_for(self, positions: int) -> int:
        """Returns how many entries of a block table `positions` positions take."""
        return -(-positions // self.block_size)

    def entries_of(self, window: int) -> int:
        """Returns how many entries a group of layers with this window holds at most; see `entries_of_window`."""
        return entries_of_window(window, self.lookahead * self.budget, self.block_size)

    def ahead(self, sequence: Sequence) -> int:
        """Returns how many positions a sequence is given blocks for behind its last token."""
        return self.lookahead * sequence.row_tokens

    def missing_blocks(self, sequence: Sequence, ahead: int) -> int:
        """Returns how many blocks a sequence lacks for `ahead` positions behind its last token."""
        positions = min(len(sequence.tokens) - 1 + ahead, sequence.last_position)
        return self.entries_for(positions) * len(self.windows) - len(sequence.blocks)

    def blocks_for(self, entries: int, held: Iterable[int] = ()) -> int:
        """Returns how many more blocks a sequence takes at most at a time for so many more entries; see `blocks_of`."""
        return blocks_of(entries, self.windows, self.lookahead * self.budget, self.block_size, held)

    def positions_held(self, sequence: Sequence) -> int:
        """Returns how many positions of a sequence may be written: those that it has blocks for, up to its limit."""
        held = len(sequence.blocks) // len(self.windows) * self.block_size
        return min(held, sequence.position_limit) if sequence.position_limit else held

    def fits(self, sequence: Sequence) -> bool:
        """Returns whether the pool could hold the sequence alone, to its last token."""
        return self.blocks_for(self.entries_for(sequence.last_position)) <= self.num_blocks

    def beam_search_error(self, prompt_tokens: int, sampling: Sampling) -> str:
        """Returns why a beam search cannot run here, whose beams must all fit together; empty: it can."""
        width = sampling.beam_width
        if not self.max_candidates:
            return "beam_width: beam search is not built for this device yet: leave it out"
        if sampling.candidates > self.max_candidates:
            most = self.max_candidates
            return f"beam_width and stop tokens need {sampling.candidates} candidates, the device reports {most}"
        if width > self.max_running:
            return f"beam_width must be at most {self.max_running} here, not {width}: so many sequences run at a time"
        shared = prompt_tokens // self.block_size
        own = self.entries_for(prompt_tokens + sampling.max_tokens - 1) - shared
        needed = self.blocks_for(shared) + width * self.blocks_for(own)
        if needed > self.num_blocks:
            return f"{width} beams need {needed} KV blocks, there are {self.num_blocks}: ask for fewer beams or tokens"
        return ""


def limits_of(claimed: Claimed, settings: Settings, max_payload: int) -> TermLimits:
    """Returns the limits of a claimed executor; `max_payload` is the broker's, in bytes."""
    return TermLimits(
        num_blocks=claimed.num_blocks,
        block_size=claimed.block_size,
        max_num_seqs=claimed.max_num_seqs,
        budget=settings.max_num_batched_tokens or claimed.step_tokens,
        window=settings.lease_window,
        prefix_cache=settings.prefix_cache,
        itl_target_ms=settings.itl_target_ms,
        max_plan_bytes=int(max_payload * PLAN_SHARE),
        max_budget=0 if settings.max_num_batched_tokens else claimed.max_step_tokens,
        mixed_prompt_tokens=claimed.mixed_prompt_tokens,
        max_candidates=claimed.max_candidates,
        windows=tuple(unpack(claimed.windows)),
        max_loras=settings.max_loras,
    )
