"""The share of the allocated KV memory that holds nothing, as PagedAttention (Kwon et al., 2023) counts it."""

from dataclasses import dataclass, field

from pagewire.services.scheduler.policy.policy import Policy
from pagewire.shared.messages import unpack
from pagewire.shared.messages.step import StepOutput


@dataclass(slots=True)
class Waste:
    """Takes a sample at the end of every step: (allocated - written) / allocated, in positions.

    Shared blocks count once, blocks that only the prefix cache knows not at all; blocks that a plan has taken from a
    sequence count as empty until the executor has answered it. What neither of the two parts below covers are ends of
    last blocks, and the tokens that decodes are about to sample.
    """

    samples: list[float] = field(default_factory=list)
    """Share that holds nothing, in [0, 1], of each step."""
    running: list[float] = field(default_factory=list)
    """The part of each sample that the step writes which begins at that moment."""
    queued: list[float] = field(default_factory=list)
    """The part of each sample that belongs to positions of prompts for the steps behind that one."""
    _written: dict[int, int] = field(default_factory=dict)

    def sample(self, policy: Policy, output: StepOutput, following: StepOutput | None = None) -> None:
        """Takes the sample of a step that has just ended, before the policy reads its output.

        `following` is the output that the step launched behind it will have, if there is one.
        """
        ran, begun = _ends(output), _ends(following) if following is not None else {}
        before, self._written = self._written, {}
        entries = written = running = queued = 0
        size = policy.limits.block_size
        for held in policy.running:
            room = len(held.blocks) * size
            done = ran.get(held.id) or max(before.get(held.id, 0), held.num_computed_tokens)
            begins = max(done, begun.get(held.id, 0))
            self._written[held.id] = done
            entries += len(held.blocks)
            written += done
            running += begins - done
            queued += max(0, min(room, held.num_prompt_tokens) - begins)
        blocks = policy.pool.num_used
        if not ran or not blocks:
            return
        if entries != blocks:  # some are shared, and full: every reference but one has counted them again
            written -= (entries - len(set().union(*(held.blocks for held in policy.running)))) * size
        self.samples.append((blocks * size - written) / (blocks * size))
        self.running.append(running / (blocks * size))
        self.queued.append(queued / (blocks * size))


def _ends(output: StepOutput) -> dict[int, int]:
    """Returns how many positions of each sequence are written when a step has ended."""
    rows = zip(unpack(output.sequences), unpack(output.starts), unpack(output.counts), strict=True)
    return {sequence: start + count for sequence, start, count in rows}
