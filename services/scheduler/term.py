"""One claim of an executor, and everything that lasts no longer than the claim."""

from collections import Counter
from dataclasses import dataclass, field

from pagewire.services.scheduler.executor_client import ExecutorClient
from pagewire.services.scheduler.policy.policy import Policy
from pagewire.services.scheduler.policy.recent_prefixes import RecentPrefixes
from pagewire.shared.metrics import table
from pagewire.shared.metrics.metric import Metric


@dataclass(eq=False)
class Term:
    """Begins when an executor is claimed and can be heard, and ends when it is lost or left."""

    executor: ExecutorClient
    policy: Policy
    prefixes: RecentPrefixes = field(init=False)
    """The prefixes that the executor's pool holds, approximately."""
    trial_lengths: dict[int, int] = field(default_factory=dict)
    """Tokens that the sequences of the request on trial had at its beginning, by sequence."""
    ended: bool = False

    def __post_init__(self) -> None:
        self.prefixes = RecentPrefixes(self.policy.limits.cached_positions)

    @property
    def number(self) -> int:
        """Fencing token: each term has a higher one than all before."""
        return self.policy.term

    @property
    def ready(self) -> bool:
        """Whether plans can be sent."""
        return not self.executor.lost.is_set()

    def load(self) -> dict[str, float]:
        """Returns the figures of a heartbeat."""
        policy = self.policy
        return {
            "running": len(policy.running),
            "waiting": len(policy.waiting),
            "blocks_held": policy.pool.num_used,
            "blocks": policy.pool.num_blocks,
            "preemptions": policy.preemptions,
            "budget": policy.step_tokens,
        }

    def counts(self) -> Counter[Metric]:
        """Returns the counts of this term."""
        policy, executor = self.policy, self.executor
        return Counter(
            {
                table.PREEMPTIONS: policy.preemptions,
                table.CACHE_QUERIES: policy.sequences.cache_queries,
                table.CACHE_HITS: policy.sequences.cache_hits,
                table.GAPS: executor.gaps,
                table.REPAIRS: executor.repairs,
            }
        )
