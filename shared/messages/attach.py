"""Scheduler to detokenizer: which sequences belong to a request."""

from enum import IntEnum

from pagewire.shared.messages.codec import Wire
from pagewire.shared.messages.done import TokenLogprobs

NEW = -2
"""`Attach.step` of new sequences: no step has had them yet."""


class Attach(Wire, frozen=True):
    """Maps the choices of a request to sequences. A later `Attach` replaces an earlier one."""

    request_id: str
    """Id of the request."""
    term: int
    """Only step outputs of this term have the request's tokens."""
    generation: int
    """Delivery count of the work item."""
    scheduler: str
    """Instance that `AbortSequences` goes to."""
    executor: str
    """Instance that runs the sequences."""
    ack: str
    """Ack subject of the work item, which the detokenizer ends after the last frame."""
    first_sequence: int
    """Choice i is sequence `first_sequence + i`."""
    tokens: tuple[bytes, ...]
    """Packed generated tokens that the scheduler knows, per choice."""
    finishes: bytes = b""
    """One `step.Finish` per choice: whether the device ended it at the last of `tokens`. Empty: all are running."""
    step: int = NEW
    """Last step of the term that `tokens` includes; -1: none."""
    move: int = 0
    """Number of times that the scheduler has moved the stream to another detokenizer."""
    opening: bytes = b""
    """Encoded `OpenStream` with which a detokenizer that does not have the stream adopts it; empty: it has it."""
    sent: bytes = b""
    """With `opening`: packed number of tokens per choice that another detokenizer has certainly sent; empty: none."""
    cumulative_logprobs: tuple[float, ...] = ()
    """Of a beam search: sum of the log-probabilities of each choice; 0 for one that has not ended."""
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """Of a beam search: what is reported of each of `tokens`, if it is asked for."""


class AttachState(IntEnum):
    """What the detokenizer knows about a request."""

    OPEN = 0
    """Frames will follow."""
    ENDED = 1
    """The request has ended, is cancelled or past its deadline: the detokenizer ends the work item."""
    UNKNOWN = 2
    """The detokenizer has no stream of this request."""
    STALE = 3
    """A newer `Attach` has come."""


class Attached(Wire, frozen=True):
    """Answer to an `Attach`."""

    state: int
    """An `AttachState`."""
    tokens: tuple[bytes, ...]
    """Packed generated tokens that the detokenizer knows, per choice. Both sides use the longer list."""
    ended: bytes
    """Packed indices of the choices that have ended."""
