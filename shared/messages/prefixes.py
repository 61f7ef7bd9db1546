"""Scheduler to tokenizers: these prefixes are cached here."""

from pagewire.shared.messages.codec import Wire


class CachedPrefixes(Wire, frozen=True):
    """Sent when it has changed, and now and then for tokenizers that have just come."""

    scheduler: str
    """Instance that can be the target of work."""
    slots: int
    """Sequences that it runs at once."""
    hashes: bytes
    """Packed hashes (`pagewire.shared.prefix_hashes`), those used last at the end."""
