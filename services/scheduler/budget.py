"""The step budget under a target for the time of a step: it shrinks and grows with measured step times."""

STEP_TARGET_MS = 50.0
"""Target in milliseconds where none is set: steps that take longer hold up those who wait for the next token."""
SHRINK = 0.8
"""Factor after a step that was too long: soon within the target again."""
GROW = 1.05
"""Factor after a full step that was short enough: slowly, so that it settles below the target."""
LEAP = 1.25
"""Factor after a full step that took less than half of the target: that cannot lead beyond it."""
SLACK = 0.9
"""Share of the target up to which a step counts as short enough to grow."""


class Budget:
    """Tokens per step, between `floor` and `ceiling`, at first `start`.

    It follows the time of steps: additive-increase controllers react too slowly to a prompt that has just begun, so
    both directions are multiplicative, and down is faster than up near the target.
    """

    def __init__(self, start: int, floor: int, ceiling: int, target_ms: float) -> None:
        self._ceiling = ceiling
        self._floor = min(floor, ceiling)
        self._target_us = target_ms * 1000
        self._value = float(start)

    @property
    def tokens(self) -> int:
        """The budget of the steps to come."""
        return int(self._value)

    def observe(self, elapsed_us: int, tokens: int) -> None:
        """Takes in a step that took `elapsed_us` microseconds for `tokens` tokens."""
        if self._floor == self._ceiling or not tokens:
            return
        if elapsed_us > self._target_us:
            # Steps that were composed under a larger budget may still arrive: they say nothing of this one.
            if tokens <= self._value:
                self._value = max(tokens * SHRINK, self._floor)
        elif elapsed_us < self._target_us * SLACK and tokens >= self._value * SLACK:
            factor = LEAP if elapsed_us < self._target_us / 2 else GROW
            self._value = min(self._value * factor + 1, self._ceiling)
