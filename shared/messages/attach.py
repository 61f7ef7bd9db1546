"""Scheduler to detokenizer: these sequences are that request, from now on, in this term."""

from enum import IntEnum

from pagewire.shared.messages.codec import Wire


class Attach(Wire, frozen=True):
    """Binds the choices of a request to sequences. A later `Attach` replaces an earlier one."""

    request_id: str
    """Which stream."""
    term: int
    """Step outputs of another term are not this request's."""
    generation: int
    """Delivery count of the work item."""
    scheduler: str
    """Instance that `Finish` goes to."""
    executor: str
    """Instance whose steps carry the sequences."""
    ack: str
    """Subject that ends the work item; the detokenizer does it after the last frame."""
    first_sequence: int
    """Choice i is sequence `first_sequence + i`."""
    tokens: tuple[bytes, ...]
    """Per choice, the generated tokens that the scheduler knows, packed."""
    finishes: bytes = b""
    """Per choice one `step.Finish`: how the device ended it at the last of `tokens`. Empty: all go on."""


class AttachState(IntEnum):
    """What the detokenizer knows of the request."""

    OPEN = 0
    """Frames will follow."""
    ENDED = 1
    """It is over, cancelled or past its deadline: the detokenizer ends the work item."""
    UNKNOWN = 2
    """No such stream here."""


class Attached(Wire, frozen=True):
    """Answer to an `Attach`."""

    state: int
    """An `AttachState`."""
    tokens: tuple[bytes, ...]
    """Per choice, the generated tokens known here, packed. The longer list wins on both sides."""
    ended: bytes
    """Packed indices of choices that are over already."""
