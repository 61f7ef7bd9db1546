"""Every service to every service: state and load of an instance."""

import msgspec

from pagewire.shared.messages.client import ModelInfo
from pagewire.shared.messages.codec import Wire

STORE_REFUSES = "store_refuses"
"""Gauge of a tokenizer: 1 while the store takes no work."""
UNSENT = "unsent"
"""Gauge of a detokenizer: subscribers to which it has not sent all frames of the steps that it has read."""
AWAITS_SUCCESSOR = "awaits_successor"
"""Gauge of a detokenizer: 1 while it drains and still takes streams, because no other one is ready yet."""

UNLOADED = "unloaded"
"""Gauge of a scheduler, and of the supervisor's heartbeat in place of an executor's: 1 while the model is unloaded
until the next request, and until it is loaded for that."""
MEMORY = "memory"
"""Gauge of every service: bytes that its process holds."""
RESERVED = "reserved"
"""Gauge of an executor on a CPU: bytes that its process holds when its KV pool is full."""


class Heartbeat(Wire, frozen=True):
    """Sent twice a second and whenever `ready` changes."""

    service: str
    """Name of the service: tokenizer, scheduler, executor, detokenizer or gateway."""
    instance: str
    """Random id of the process."""
    ready: bool
    """Whether the instance can process requests now."""
    term: int
    """Current term of a scheduler or executor, newest term that a detokenizer reads; 0 for others."""
    plan: int
    """Last plan that a scheduler has sent or an executor has applied."""
    step: int
    """Last step that an executor has run, or that a scheduler or detokenizer has read."""
    load: dict[str, float]
    """Gauges and counters by name, for `pagewire status` and the benchmarks."""
    reads: dict[int, int] = msgspec.field(default_factory=dict)
    """Last step that a detokenizer has read of each term; every executor has a term of its own."""
    draining: bool = False
    """Whether the instance is about to end, and hands over or finishes its work. It is not ready then."""
    model: str = ""
    """Token of the served model in subjects; empty: the instance serves every model, as a gateway does."""
    models: tuple[ModelInfo, ...] = ()
    """Descriptions of the model that a tokenizer serves, one per name."""
    repeated: bool = False
    """Whether a supervisor sends it again, in the place of an instance that waits for a core of the machine."""
    problem: str = ""
    """Why requests cannot be served although the instance runs, in words for people; empty: they can."""
