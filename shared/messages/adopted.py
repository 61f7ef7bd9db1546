"""Detokenizer to all detokenizers: claims streams, so that no other one goes on with them."""

from pagewire.shared.messages.codec import Wire


class Adopted(Wire, frozen=True):
    """Claims the streams of these requests for the sender.

    A receiver that has one of them drops it without a word, unless its own attachment is newer: then it sends an
    `Adopted` in turn.
    """

    instance: str
    """Instance id of the sender."""
    request_ids: tuple[str, ...]
    """Requests whose streams the sender has."""
    attachments: bytes
    """Packed triples (generation, term, move) of each request's last `Attach` at the sender; zeros: it has none."""
