"""Every service to every service: state and load of an instance."""

import msgspec

from pagewire.shared.messages.codec import Wire

STORE_REFUSES = "store_refuses"
"""Load of a tokenizer: 1 while the store takes no work."""
UNSENT = "unsent"
"""Load of a detokenizer: subscribers to which it has not sent all frames of the steps that it has read."""

AWAITS_SUCCESSOR = "awaits_successor"
"""Load of a detokenizer: 1 while it drains and still takes streams, because no other one is ready yet."""


class Heartbeat(Wire, frozen=True):
    """Sent twice a second and whenever `ready` changes."""

    service: str
    """tokenizer, scheduler, executor, detokenizer or gateway."""
    instance: str
    """Random id of the process."""
    ready: bool
    """Whether the instance can process requests now."""
    term: int
    """Scheduler and executor: the current term; detokenizer: the newest term that it reads; others: 0."""
    plan: int
    """Last plan sent (scheduler) or applied (executor)."""
    step: int
    """Last step run (executor) or read (scheduler, detokenizer)."""
    load: dict[str, float]
    """Gauges and counters by name, for `pagewire status` and the benchmarks."""
    reads: dict[int, int] = msgspec.field(default_factory=dict)
    """Detokenizer: last step read, by term; every executor has a term of its own."""
    draining: bool = False
    """Whether the instance is about to end: it hands over or finishes what it has. It is not ready then."""
