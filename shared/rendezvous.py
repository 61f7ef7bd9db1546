"""Chooses one of several instances by the id of a request."""

import hashlib
from collections.abc import Iterable


def rank(name: str, instances: Iterable[str]) -> list[str]:
    """Returns the instances in order of preference for `name`, which is the same for every caller.

    Rendezvous hashing (Thaler and Ravishankar, 1996): when an instance joins or leaves, only the names that belong to
    it move. So a repeated request reaches the detokenizer that knows the request.

    >>> rank("request-b", ["d1", "d2", "d3"])
    ['d3', 'd1', 'd2']
    >>> rank("request-b", ["d1", "d3"])
    ['d3', 'd1']
    """

    def weight(instance: str) -> bytes:
        return hashlib.blake2b(f"{name} {instance}".encode(), digest_size=8).digest()

    ranked = list(instances)
    if len(ranked) > 1:
        ranked.sort(key=lambda instance: (weight(instance), instance), reverse=True)
    return ranked
