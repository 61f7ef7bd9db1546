"""The step budget under a target for the time of a step: it shrinks and grows with measured step times."""

from math import inf

from pagewire.services.scheduler.limits import Limits

STEP_TARGET_MS = 50.0
"""Target in milliseconds where none is set: steps that take longer hold up those who wait for the next token."""
PROMPT_TOKENS = 64
"""Prompt tokens that a step has room for, at least, where no target is set: with fewer, those who wait for the first
token would pay too much for the others."""
PROMPTS_PER_DECODE = 2
"""Prompt tokens for each decode that a step has room for where no target is set: a step of many decodes takes long
anyway, and the more end, the more prompts come."""
SHRINK = 0.8
"""Factor after a step that was too long: soon within the target again."""
FALL = 0.5
"""Factor after a step that took more than twice the target: that cannot lead below it."""
GROW = 1.05
"""Factor after a full step that was short enough: slowly, so that it settles below the target."""
LEAP = 1.25
"""Factor after a full step that took less than half of the target: that cannot lead beyond it."""
SLACK = 0.9
"""Share of the target up to which a step counts as short enough to grow."""


class Budget:
    """Tokens per step: at first `start`, never more than `ceiling`, with room for all decodes, and beside them for
    `spare` tokens or `share` tokens for each, whichever is more.

    It follows the time of steps: additive-increase controllers react too slowly to a prompt that has just begun, so
    both directions are multiplicative, and down is faster than up near the target.
    """

    def __init__(self, start: int, ceiling: int, spare: int, target_ms: float, share: int = 0) -> None:
        self._start = start
        self._ceiling = ceiling
        self._spare = spare
        self._share = share
        self._target_us = target_ms * 1000
        self._value = float(start)

    def tokens(self, decodes: int) -> int:
        """The budget of the steps to come while so many sequences decode.

        While there are none, nobody waits for a next token, and steps are not smaller than they were at first.
        """
        floor = decodes + max(self._spare, self._share * decodes) if decodes else self._start
        return min(max(int(self._value), floor), self._ceiling)

    def observe(self, elapsed_us: int, tokens: int) -> None:
        """Takes in a step that took `elapsed_us` microseconds for `tokens` tokens."""
        if not tokens:
            return
        if elapsed_us > self._target_us:
            # Steps that were composed under a larger budget may still arrive: they say nothing of this one.
            if tokens <= self._value:
                factor = FALL if elapsed_us > self._target_us * 2 else SHRINK
                self._value = max(tokens * factor, self._spare)
        elif elapsed_us < self._target_us * SLACK and tokens >= self._value * SLACK:
            factor = LEAP if elapsed_us < self._target_us / 2 else GROW
            self._value = min(self._value * factor + 1, self._ceiling)


def budget_of(limits: Limits) -> Budget:
    """It follows the user's target; else, where the device says how far it may grow, one of ours; else it is fixed."""
    start, ceiling = limits.budget, max(limits.budget, limits.max_budget)
    if limits.itl_target_ms is not None:
        return Budget(start, ceiling, limits.block_size, limits.itl_target_ms)
    if ceiling > start:
        return Budget(start, ceiling, PROMPT_TOKENS, STEP_TARGET_MS, PROMPTS_PER_DECODE)
    return Budget(start, start, 0, inf)
