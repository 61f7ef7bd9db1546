"""The prompts in progress: which one is computed first, and which waiting prompts may join them."""

from pagewire.services.scheduler.policy.sequence import Sequence

PATIENCE = 8
"""Steps for which shorter prompts may pass a prompt in progress; then that prompt goes first for a step."""
STEPS_AHEAD = 3
"""Steps' worth of prompt tokens that may lie before a prompt that gets a slot. Blocks are reserved for such a prompt
long before it is reached, but a step that finds too few prompt tokens runs half empty: hence one for the step that
runs, one for the step queued behind it, and one for the time that a plan takes."""
NO_CUTOFF = 1 << 62, 0
"""Priority and length that no prompt reaches."""


class PrefillQueue(dict[int, Sequence]):
    """Running sequences that have not sampled since their admission, by id."""

    def in_order(self, num_steps: int) -> list[Sequence]:
        """Returns the prompts in their order after `num_steps` steps: those passed for too long, then the shortest."""
        if len(self) < 2:
            return list(self.values())
        overdue = num_steps - PATIENCE
        ranked = [
            (s.last_step > overdue, s.priority, len(s.tokens) - s.num_computed_tokens, s.arrival_order, s.id, s)
            for s in self.values()
        ]
        ranked.sort()
        return [entry[-1] for entry in ranked]

    def cutoff(self, tokens: int) -> tuple[int, int]:
        """Returns priority and length from which on a prompt would have at least `tokens` computed before it."""
        before = 0
        for priority, left in sorted((s.priority, len(s.tokens) - s.num_computed_tokens) for s in self.values()):
            before += left
            if before >= tokens:
                return priority, left
        return NO_CUTOFF
