"""The token budget of a step, which follows measured step times toward a target."""

from dataclasses import dataclass
from math import inf

from pagewire.services.scheduler.policy.term_limits import TermLimits
from pagewire.shared.settings.config import SIZES_PER_OCTAVE

STEP_TARGET_MS = 50.0
"""Target in milliseconds where none is set. Longer steps delay the next token of every sequence that decodes."""
MIN_PROMPT_TOKENS = 64
"""Prompt tokens that a step with decodes has room for, at least, where no target is set. With fewer, first tokens would
be too late for the sake of next tokens."""
PROMPTS_PER_DECODE = 2
"""Prompt tokens per decode that a step has room for where no target is set: a step of many decodes takes long anyway,
and the more sequences end, the more prompts come."""
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
PROMPT_STEPS = 8
"""Steps within which the prompts that wait should be computed where no step time is set: room for prompts beside
decodes grows with them, and time to first token and time between tokens grow together."""
MIXED_GROWTH = 4
"""Greatest factor by which that room grows."""


@dataclass
class Budget:
    """Tokens per step. They grow and shrink by factors: sums would react too slowly to a prompt that has just begun.

    >>> budget = Budget(start=512, ceiling=2048, min_prompt_tokens=64, target_ms=50.0)
    >>> budget.observe(elapsed_us=60_000, tokens=512)  # too long
    >>> budget.tokens(decodes=8)
    409
    >>> budget.tokens(decodes=400)  # all of them, and prompts beside them
    464
    """

    start: int
    """Tokens at first, and of a step without decodes at least, since no next token waits for it."""
    ceiling: int
    """Tokens at most."""
    min_prompt_tokens: int
    """Prompt tokens that a step has room for beside its decodes, at least."""
    target_ms: float
    """Milliseconds that a step should take at most; infinite: the budget does not change."""
    prompts_per_decode: int = 0
    """Prompt tokens per decode that a step has room for, at least."""
    mixed_prompt_tokens: int = 0
    """Prompt tokens of a step with decodes, at most, while few prompts wait; 0: no limit."""

    def __post_init__(self) -> None:
        self._tokens = float(self.start)
        self._target_us = self.target_ms * 1000

    def tokens(self, decodes: int, prompt_tokens: int = 0) -> int:
        """Returns the budget of steps with so many decodes while `prompt_tokens` are to be computed."""
        if not decodes:
            return min(max(int(self._tokens), self.start), self.ceiling)
        tokens = min(max(int(self._tokens), decodes + self._least_room(decodes)), self.ceiling)
        return min(tokens, self._mixed_tokens(decodes, prompt_tokens)) if self.mixed_prompt_tokens else tokens

    def _least_room(self, decodes: int) -> int:
        """Returns the least prompt tokens of a step with decodes.

        Where the two minima are nearly equal, neither is enough, hence twice the smaller one: otherwise prompts three
        times as long as the outputs would queue.
        """
        fixed, grown = self.min_prompt_tokens, self.prompts_per_decode * decodes
        return max(fixed, grown, 2 * min(fixed, grown))

    def _mixed_tokens(self, decodes: int, prompt_tokens: int) -> int:
        """Returns the most tokens of a step with decodes. Its room doubles, since a new budget is a new plan."""
        room = self.mixed_prompt_tokens
        while room < self.mixed_prompt_tokens * MIXED_GROWTH and room * PROMPT_STEPS < prompt_tokens:
            room *= 2
        between = max(1, room // SIZES_PER_OCTAVE)
        return (decodes + room) // between * between

    def observe(self, elapsed_us: int, tokens: int) -> None:
        """Adapts to a step that took `elapsed_us` microseconds for `tokens` tokens."""
        if elapsed_us > self._target_us:
            # Steps composed under a larger budget may still arrive. They say nothing about the present budget.
            if 0 < tokens <= self._tokens:
                factor = VERY_LATE if elapsed_us > 2 * self._target_us else LATE
                self._tokens = max(tokens * factor, self.min_prompt_tokens)
        elif elapsed_us < self._target_us * SLACK and tokens >= self._tokens * SLACK:
            factor = VERY_EARLY if elapsed_us < self._target_us / 2 else EARLY
            self._tokens = min(self._tokens * factor + 1, self.ceiling)


def budget_of(limits: TermLimits) -> Budget:
    """Returns a budget that follows the user's target, else ours where the device allows growth, else a fixed one, of
    which prompts beside decodes get a part."""
    start, ceiling = limits.budget, max(limits.budget, limits.max_budget)
    if limits.itl_target_ms is not None:
        return Budget(start, ceiling, limits.block_size, limits.itl_target_ms)
    if ceiling > start:
        return Budget(start, ceiling, MIN_PROMPT_TOKENS, STEP_TARGET_MS, PROMPTS_PER_DECODE)
    return Budget(start, start, 0, inf, mixed_prompt_tokens=limits.mixed_prompt_tokens)
