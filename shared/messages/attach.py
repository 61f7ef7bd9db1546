"""Scheduler to detokenizer: binds a request's stream to its sequences."""

from enum import IntEnum

from pagewire.shared.messages.codec import Wire
from pagewire.shared.messages.done import ReportedLogprobs

NEW = -2
"""`Attach.step` of new sequences: no step has had them yet."""
AttachOrder = tuple[int, int, int]
"""Generation, term and move of an `Attach`: higher for a newer one. Zeros stand for no `Attach` at all."""


class Attach(Wire, frozen=True):
    """Binds the choices of a request to sequences, and replaces every `Attach` of lower `order`.

    With an `opening`, it also has a detokenizer adopt the stream.
    """

    request_id: str
    """Id of the request."""
    term: int
    """Only step outputs of this term have the request's tokens."""
    generation: int
    """Delivery count of the work item."""
    scheduler: str
    """Instance id of the sender, to which `AbortSequences` goes."""
    executor: str
    """Instance id of the executor that runs the sequences."""
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
    """Encoded `OpenStream` with which the receiver adopts the stream if it does not have it; empty: it has it."""
    sent: bytes = b""
    """With `opening`: packed number of tokens per choice that another detokenizer has certainly sent; empty: none."""
    cumulative_logprobs: tuple[float, ...] = ()
    """Cumulative log-probability of each choice of a beam search; 0 for a choice that has not ended."""
    logprobs: tuple[tuple[ReportedLogprobs, ...], ...] = ()
    """Log-probabilities of each of the `tokens` of a beam search, if the request asks for them."""

    @property
    def order(self) -> AttachOrder:
        """Place of this message among all of the request."""
        return self.generation, self.term, self.move


class AttachState(IntEnum):
    """State of a request at the detokenizer."""

    OPEN = 0
    """Frames will follow."""
    ENDED = 1
    """The request has ended, is cancelled or past its deadline: the detokenizer ends the work item."""
    UNKNOWN = 2
    """The detokenizer has no stream of this request."""
    STALE = 3
    """The detokenizer has a newer `Attach` of the request."""


class Attached(Wire, frozen=True):
    """Reply to an `Attach`."""

    state: int
    """An `AttachState`."""
    tokens: tuple[bytes, ...]
    """Packed generated tokens that the detokenizer knows, per choice. Both sides use the longer list."""
    ended: bytes
    """Packed indices of the choices that have ended."""
