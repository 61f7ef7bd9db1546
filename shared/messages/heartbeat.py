"""Any to any: I am here, this far, this busy."""

import msgspec

from pagewire.shared.messages.codec import Wire


class Heartbeat(Wire, frozen=True):
    """Sent twice a second and at every change of `ready`."""

    service: str
    """tokenizer, scheduler, executor, detokenizer or gateway."""
    instance: str
    """Random id of the process."""
    ready: bool
    """It could do its part of a request now."""
    term: int
    """Scheduler and executor: the term in force; detokenizer: the newest that it reads; others 0."""
    plan: int
    """Last plan sent or applied."""
    step: int
    """Last step run or read."""
    load: dict[str, float]
    """Named gauges and counters, for `pagewire status` and the benchmarks."""
    reads: dict[int, int] = msgspec.field(default_factory=dict)
    """Detokenizer: the last step read of each term, one per executor."""
