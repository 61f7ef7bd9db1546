"""The share of the allocated KV memory that holds nothing, as PagedAttention (Kwon et al., 2023) counts it."""

from dataclasses import dataclass, field

from pagewire.services.scheduler.policy import Policy
from pagewire.shared.messages import unpack
from pagewire.shared.messages.step import StepOutput


@dataclass(slots=True)
class Waste:
    """Takes a sample at the end of every step: (allocated - written) / allocated, in positions.

    Shared blocks count once, blocks that only the prefix cache knows not at all; blocks that a plan has taken from a
    sequence count as empty until the executor has answered it.
    """

    samples: list[float] = field(default_factory=list)
    """In [0, 1], one per step."""
    reserved: list[float] = field(default_factory=list)
    """The part of each sample that belongs to positions of prompts that the steps ahead will fill."""
    _written: dict[int, int] = field(default_factory=dict)

    def sample(self, policy: Policy, output: StepOutput) -> None:
        """Takes the sample of a step that has just ended, before the policy reads its output."""
        rows = zip(unpack(output.sequences), unpack(output.starts), unpack(output.counts), strict=True)
        ran = {sequence: start + count for sequence, start, count in rows}
        before, self._written = self._written, {}
        entries = written = reserved = 0
        size = policy.limits.block_size
        for held in policy.running:
            done = ran.get(held.id) or max(before.get(held.id, 0), held.num_computed_tokens)
            self._written[held.id] = done
            entries += len(held.blocks)
            written += done
            reserved += max(0, min(len(held.blocks) * size, held.num_prompt_tokens) - done)
        blocks = policy.pool.num_used
        if not ran or not blocks:
            return
        if entries != blocks:  # some are shared, and full: every reference but one has counted them again
            written -= (entries - len(set().union(*(held.blocks for held in policy.running)))) * size
        self.samples.append((blocks * size - written) / (blocks * size))
        self.reserved.append(reserved / (blocks * size))
