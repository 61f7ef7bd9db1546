"""Detokenizer to detokenizers: the streams that it has adopted, so that no other one goes on with them."""

from pagewire.shared.messages.codec import Wire


class Adopted(Wire, frozen=True):
    """Another detokenizer that has one of these streams, and no newer attachment of it, drops it without a word.

    One that has a newer attachment announces that in turn.
    """

    instance: str
    """The sender."""
    request_ids: tuple[str, ...]
    """Requests whose streams it has."""
    attachments: bytes
    """Packed triples (generation, term, move) of the last `Attach` of each; zeros: none has come."""
