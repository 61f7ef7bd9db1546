"""Which detokenizer speaks to the client of a request."""

import hashlib
from collections.abc import Iterable


def rank(request_id: str, instances: Iterable[str]) -> list[str]:
    """The instances, best first, in the order that every tokenizer finds for this request.

    Rendezvous hashing (Thaler and Ravishankar, 1996): when an instance comes or goes, only its own requests move, so a
    request that is sent again meets the detokenizer that knows it.
    """

    def weight(instance: str) -> bytes:
        return hashlib.blake2b(f"{request_id} {instance}".encode(), digest_size=8).digest()

    return sorted(instances, key=lambda instance: (weight(instance), instance), reverse=True)
