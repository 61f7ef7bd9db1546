"""Which replica a request is addressed to. Pure: tokenizers and the simulation run the same function.

The replica that has most of the prompt's prefix cached takes it, as in SGLang's router, unless it is busier than the
least busy one by more than `SLACK`: then computing the prefix again is cheaper than waiting.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from pagewire.shared.placement import rank
from pagewire.shared.subjects import ANY

SLACK = 0.25
"""Share of its slots by which a replica may be busier than the least busy one and still get what it has cached."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One scheduler and its executor, as far as a tokenizer knows."""

    instance: str
    slots: int
    """Sequences that it runs at once."""
    load: int
    """Sequences that it runs, and that wait for it."""
    cached: AbstractSet[int]
    """Hashes of prefixes that it has computed lately."""


def route(request_id: str, hashes: Sequence[int], replicas: Sequence[Replica]) -> str:
    """The target of a request whose prompt has these `pagewire.shared.prefix_hashes`.

    `ANY` where nothing is known of several replicas, or where each has as much as it can run and none the prefix: then
    the first that has room takes the request.
    """
    if len(replicas) < 2:
        return ANY
    least = min(replica.load / replica.slots for replica in replicas)
    near = {r.instance: r for r in replicas if r.load / r.slots <= least + SLACK}
    # `max` keeps the first of equals, and the order by the request's id keeps tokenizers from all choosing the same.
    best = max(
        (near[instance] for instance in rank(request_id, near)),
        key=lambda replica: (matched(hashes, replica.cached), -replica.load / replica.slots),
    )
    full = best.load >= best.slots
    return ANY if full and not matched(hashes, best.cached) else best.instance


def matched(hashes: Sequence[int], cached: AbstractSet[int]) -> int:
    """How many spans of the prompt are cached, from its beginning on."""
    return next((length for length in range(len(hashes), 0, -1) if hashes[length - 1] in cached), 0)
