"""The step budget under a target for inter-token latency: it shrinks and grows with measured step times."""

SHRINK = 0.8
"""Factor after a step that was too long: soon within the target again."""
GROW = 1.05
"""Factor after a full step that was short enough: slowly, so that it settles below the target."""
SLACK = 0.9
"""Share of the target up to which a step counts as short enough to grow."""


class Budget:
    """Tokens per step, between `floor` and `ceiling`.

    Without a target it stays at `ceiling`. With one, it follows the time of steps: additive-increase controllers react
    too slowly to a prompt that has just begun, so both directions are multiplicative, down faster than up.
    """

    def __init__(self, ceiling: int, floor: int, target_ms: float | None = None) -> None:
        self._ceiling = ceiling
        self._floor = min(floor, ceiling)
        self._target_us = None if target_ms is None else target_ms * 1000
        self._value = float(ceiling)

    @property
    def tokens(self) -> int:
        """The budget of the steps to come."""
        return int(self._value)

    def observe(self, elapsed_us: int, tokens: int) -> None:
        """Takes in a step that took `elapsed_us` microseconds for `tokens` tokens."""
        if self._target_us is None or not tokens:
            return
        if elapsed_us > self._target_us:
            # Steps that were composed under a larger budget may still arrive: they say nothing of this one.
            if tokens <= self._value:
                self._value = max(tokens * SHRINK, self._floor)
        elif elapsed_us < self._target_us * SLACK and tokens >= self._value * SLACK:
            self._value = min(self._value * GROW + 1, self._ceiling)
