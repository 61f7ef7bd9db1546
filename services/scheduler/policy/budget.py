"""The token budget of a step, which follows measured step times toward a target and has room for the prompts that come.

Where steps are longer than the target anyway, the room follows the load: with less than the prompts that come, first
tokens would be later and later, and with more, next tokens would wait in vain.
"""

from dataclasses import dataclass
from math import inf

from pagewire.services.scheduler.policy.term_limits import TermLimits
from pagewire.shared.settings.config import SIZES_PER_OCTAVE

STEP_TARGET_MS = 50.0
"""Target in milliseconds where none is set. Longer steps delay the next token of every sequence that decodes."""
MIN_PROMPT_TOKENS = 64
"""Prompt tokens that a step with decodes has room for, at least, where no target is set. With fewer, first tokens would
be too late for the sake of next tokens."""
ROOM_PER_LOAD = 2
"""Room for prompts over the prompt tokens that come per step. With twice as much, a prompt seldom waits for others."""
MIXED_GROWTH = 4
"""Greatest factor by which a device's room for prompts beside decodes grows."""
ENDED = 64
"""Ended sequences over which the load is averaged."""
LATE = 0.8
"""Factor after a step that took longer than the target."""
VERY_LATE = 0.5
"""Factor after a step that took more than twice the target."""
EARLY = 1.05
"""Factor after a full step that was short enough: small, so that the budget settles below the target."""
VERY_EARLY = 1.25
"""Factor after a full step that took less than half of the target."""
SLACK = 0.9
"""Share of the target below which a step is short enough, and share of the budget from which on it is full."""


@dataclass
class Budget:
    """Tokens per step. They grow and shrink by factors: sums would react too slowly to a prompt that has just begun.

    >>> budget = Budget(start=512, ceiling=2048, target_ms=50.0, min_room=64, max_room=2048)
    >>> budget.observe(elapsed_us=60_000, tokens=512)  # too long
    >>> budget.tokens(decodes=8)
    409
    >>> budget.count(prompt_tokens=2000, output_tokens=20)
    >>> budget.tokens(decodes=8)  # of which each brings 100 prompt tokens
    1608
    """

    start: int
    """Tokens at first, and of a step without decodes at least, since no next token waits for it."""
    ceiling: int
    """Tokens at most."""
    target_ms: float
    """Milliseconds that a step should take at most; 0: each step has the least room; infinite: the budget is fixed."""
    min_room: int = 0
    """Prompt tokens that a step has room for beside its decodes, at least, however few the load brings."""
    max_room: int = 0
    """Prompt tokens that the load can make room for, at most."""

    def __post_init__(self) -> None:
        self._tokens = float(self.start) if self.target_ms else 0.0
        self._target_us = self.target_ms * 1000
        self._prompt_tokens = self._output_tokens = 0.0

    def tokens(self, decodes: int) -> int:
        """Returns the budget of steps with so many decodes."""
        if not decodes:
            return min(max(int(self._tokens), self.start), self.ceiling)
        room = self._room(decodes)
        least = decodes + room
        if not self.target_ms:  # the device has captured steps of these sizes
            least -= least % (1 << room.bit_length() - SIZES_PER_OCTAVE.bit_length())
        return min(max(int(self._tokens), least), self.ceiling)

    def _room(self, decodes: int) -> int:
        """Returns the prompt tokens that a step with decodes has room for, at least."""
        coming = decodes * self._prompt_tokens / max(1.0, self._output_tokens)
        return max(self.min_room, min(int(ROOM_PER_LOAD * coming), self.max_room))

    def count(self, prompt_tokens: int, output_tokens: int) -> None:
        """Counts what a sequence that has ended brought: tokens of its prompt that were not cached, and its output."""
        keep = 1 - 1 / ENDED
        self._prompt_tokens = self._prompt_tokens * keep + prompt_tokens
        self._output_tokens = self._output_tokens * keep + output_tokens

    def observe(self, elapsed_us: int, tokens: int) -> None:
        """Adapts to a step that took `elapsed_us` microseconds for `tokens` tokens."""
        if elapsed_us > self._target_us:
            # Steps composed under a larger budget may still arrive. They say nothing about the present budget.
            if 0 < tokens <= self._tokens:
                factor = VERY_LATE if elapsed_us > 2 * self._target_us else LATE
                self._tokens = max(tokens * factor, self.min_room)
        elif elapsed_us < self._target_us * SLACK and tokens >= self._tokens * SLACK:
            factor = VERY_EARLY if elapsed_us < self._target_us / 2 else EARLY
            self._tokens = min(self._tokens * factor + 1, self.ceiling)


def budget_of(limits: TermLimits) -> Budget:
    """Returns a budget that follows the user's target, else ours where the device allows growth, else a fixed one, of
    which prompts beside decodes get a part."""
    start, ceiling, mixed = limits.budget, max(limits.budget, limits.max_budget), limits.mixed_prompt_tokens
    if limits.itl_target_ms is not None:
        return Budget(start, ceiling, limits.itl_target_ms, limits.block_size)
    if ceiling > start:
        return Budget(start, ceiling, STEP_TARGET_MS, MIN_PROMPT_TOKENS, ceiling)
    return Budget(start, start, 0.0, mixed, mixed * MIXED_GROWTH) if mixed else Budget(start, start, inf)
