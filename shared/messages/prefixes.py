"""Scheduler to tokenizers: the prefixes that a replica has cached."""

from pagewire.shared.messages.codec import Wire


class CachedPrefixes(Wire, frozen=True):
    """Sent after changes, and periodically for tokenizers that have just started."""

    scheduler: str
    """Instance id of the scheduler, the target of work for this replica."""
    slots: int
    """Sequences that the replica runs at once."""
    hashes: bytes
    """Packed hashes (`pagewire.shared.prefix_hashes`), the most recently used last."""
