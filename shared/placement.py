"""Which of several instances is the one for something that has an id."""

import hashlib
from collections.abc import Iterable


def rank(name: str, instances: Iterable[str]) -> list[str]:
    """The instances, best first, in the order that everybody finds for this name.

    Rendezvous hashing (Thaler and Ravishankar, 1996): when an instance comes or goes, only its own names move, so a
    request that is sent again meets the detokenizer that knows it.
    """

    def weight(instance: str) -> bytes:
        return hashlib.blake2b(f"{name} {instance}".encode(), digest_size=8).digest()

    ranked = list(instances)
    if len(ranked) > 1:
        ranked.sort(key=lambda instance: (weight(instance), instance), reverse=True)
    return ranked
