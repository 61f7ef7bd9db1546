"""The prompts in progress: which of them goes first, and which may join them."""

from pagewire.services.scheduler.sequence import Sequence

PATIENCE = 8
"""Steps for which shorter prompts may pass a prompt in progress; then it goes first for a step."""
STEPS_AHEAD = 3
"""Steps' worth of prompt tokens that may lie before a prompt that gets a slot. Its blocks are given at once and stay
empty until it is reached, but a step that finds too few prompt tokens runs half empty: so one for the step that runs,
one for the step queued behind it, one for the time that a plan takes."""

NOBODY = 1 << 62, 0
"""A priority that no prompt has."""


class Prompts(dict[int, Sequence]):
    """Running sequences that have not sampled since their admission, by id."""

    def order(self, runs: int) -> list[int]:
        """Their slots, if there are several, after `runs` steps: those passed for too long, then the shortest."""
        if len(self) < 2:
            return []
        ranked = [
            (runs - s.served < PATIENCE, s.priority, len(s.tokens) - s.computed, s.arrival, s.id, s.slot)
            for s in self.values()
        ]
        ranked.sort()
        return [entry[-1] for entry in ranked]

    def reach(self, tokens: int) -> tuple[int, int]:
        """Priority and length from which on another prompt would have at least `tokens` computed before it."""
        before = 0
        for priority, left in sorted((s.priority, len(s.tokens) - s.computed) for s in self.values()):
            before += left
            if before >= tokens:
                return priority, left
        return NOBODY
