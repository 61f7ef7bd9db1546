"""One claim of an executor, and everything that lasts no longer than the claim."""

from collections import Counter
from dataclasses import dataclass, field

from pagewire.services.scheduler.executor_client import ExecutorClient
from pagewire.services.scheduler.policy.policy import Policy
from pagewire.services.scheduler.policy.recent_prefixes import RecentPrefixes
from pagewire.services.scheduler.policy.term_limits import TermLimits
from pagewire.shared.metrics import table
from pagewire.shared.metrics.metric import Metric

COUNTED = (table.PREEMPTIONS, table.CACHE_QUERIES, table.CACHE_HITS, table.GAPS, table.REPAIRS)
"""The counters of `Term.counts`, which go on over all terms."""


@dataclass(eq=False)
class Term:
    """The claim of one executor: it begins when the executor can be heard, and ends when that is lost or left."""

    executor: ExecutorClient
    policy: Policy
    prefixes: RecentPrefixes
    trial_lengths: dict[int, int] = field(default_factory=dict)
    """Tokens that the sequences of the request on trial had at its beginning, by sequence."""
    ended: bool = False
    """Whether the executor is lost or left, and no longer the one of this scheduler."""

    @classmethod
    def begin(cls, executor: ExecutorClient, limits: TermLimits, before: "Term | None", kept_term: int) -> "Term":
        """Returns a new term of an executor. What was computed in the term `before` is still there if that is its
        `Claimed.kept_term`."""
        if before is None or before.number != kept_term or before.policy.limits != limits:
            return cls(executor, Policy(executor.term, limits), RecentPrefixes(limits.cached_positions))
        return cls(executor, Policy(executor.term, limits, before.policy), before.prefixes)

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
            "blocks_shared": policy.pool.num_shared,
            "blocks_blank": policy.pool.num_blank,
            "preemptions": policy.preemptions,
            "budget": policy.step_tokens,
        }

    def counts(self) -> Counter[Metric]:
        """Returns the counts of this term."""
        policy, executor = self.policy, self.executor
        cache = policy.sequences.cache_queries, policy.sequences.cache_hits
        return Counter(dict(zip(COUNTED, (policy.preemptions, *cache, executor.gaps, executor.repairs), strict=True)))
