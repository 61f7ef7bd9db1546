"""The token budget of a step, which follows measured step times toward a target."""

from math import inf

from pagewire.services.scheduler.policy.term_limits import TermLimits

STEP_TARGET_MS = 50.0
"""Target in milliseconds where none is set. Longer steps delay the next token of every sequence that decodes."""
PROMPT_TOKENS = 64
"""Prompt tokens that a step has room for, at least, where no target is set. With fewer, first tokens would be too late
for the sake of next tokens."""
PROMPTS_PER_DECODE = 2
"""Prompt tokens per decode that a step has room for where no target is set: a step of many decodes takes long anyway,
and the more sequences end, the more prompts come."""
SHRINK = 0.8
"""Factor after a step that took longer than the target."""
FALL = 0.5
"""Factor after a step that took more than twice the target, which does not lead below the target."""
GROW = 1.05
"""Factor after a full step that was short enough: small, so that the budget settles below the target."""
LEAP = 1.25
"""Factor after a full step that took less than half of the target, which does not lead beyond the target."""
SLACK = 0.9
"""Share of the target up to which a step is short enough for the budget to grow."""
PROMPT_STEPS = 8
"""Steps within which the prompts that wait should be computed where no step time is set: room for prompts beside
decodes grows with them, and time to first token and time between tokens grow together."""
MIXED_GROWTH = 4
"""Factor up to which that room grows."""
QUARTERS = 4
"""A GPU's graphs have steps of four sizes per octave: tokens beyond a size would cost as many as up to the next one."""


class Budget:
    """Tokens per step: at first `start`, never more than `ceiling`, with room for all decodes and, beside them, for
    `spare` tokens, `share` tokens per decode or twice the smaller of these two, whichever is most. Neither is enough
    where they are nearly equal: prompts three times as long as the outputs would queue.

    An additive increase reacts too slowly to a prompt that has just begun, so the budget grows and shrinks by factors.
    Near the target it shrinks faster than it grows.
    """

    def __init__(
        self, start: int, ceiling: int, spare: int, target_ms: float, share: int = 0, mixed_prompt_tokens: int = 0
    ) -> None:
        """`mixed_prompt_tokens`: prompt tokens of a step with decodes where few prompts wait; 0: no such limit."""
        self._start = start
        self._ceiling = ceiling
        self._spare = spare
        self._share = share
        self._target_us = target_ms * 1000
        self._mixed = mixed_prompt_tokens
        self._value = float(start)

    def tokens(self, decodes: int, prompt_tokens: int = 0) -> int:
        """Returns the budget of the next steps while `decodes` sequences decode and `prompt_tokens` are to be computed.

        Without decodes nothing waits for a next token, and the budget is at least `start`.
        """
        shared = self._share * decodes
        floor = decodes + max(self._spare, shared, 2 * min(self._spare, shared)) if decodes else self._start
        budget = min(max(int(self._value), floor), self._ceiling)
        return min(budget, self._mixed_tokens(decodes, prompt_tokens)) if decodes and self._mixed else budget

    def _mixed_tokens(self, decodes: int, prompt_tokens: int) -> int:
        """Returns the tokens of a step of decodes and prompts. Their room doubles, since a new budget is a new plan."""
        room = self._mixed
        while room < self._mixed * MIXED_GROWTH and room * PROMPT_STEPS < prompt_tokens:
            room *= 2
        quarter = max(1, room // QUARTERS)
        return (decodes + room) // quarter * quarter

    def observe(self, elapsed_us: int, tokens: int) -> None:
        """Adapts to a step that took `elapsed_us` microseconds for `tokens` tokens."""
        if not tokens:
            return
        if elapsed_us > self._target_us:
            # Steps composed under a larger budget may still arrive. They say nothing about the present budget.
            if tokens <= self._value:
                factor = FALL if elapsed_us > self._target_us * 2 else SHRINK
                self._value = max(tokens * factor, self._spare)
        elif elapsed_us < self._target_us * SLACK and tokens >= self._value * SLACK:
            factor = LEAP if elapsed_us < self._target_us / 2 else GROW
            self._value = min(self._value * factor + 1, self._ceiling)


def budget_of(limits: TermLimits) -> Budget:
    """Returns a budget that follows the user's target, else ours where the device allows growth, else a fixed one, of
    which prompts beside decodes get a part."""
    start, ceiling = limits.budget, max(limits.budget, limits.max_budget)
    if limits.itl_target_ms is not None:
        return Budget(start, ceiling, limits.block_size, limits.itl_target_ms)
    if ceiling > start:
        return Budget(start, ceiling, PROMPT_TOKENS, STEP_TARGET_MS, PROMPTS_PER_DECODE)
    return Budget(start, start, 0, inf, mixed_prompt_tokens=limits.mixed_prompt_tokens)
