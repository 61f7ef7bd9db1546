"""A request that this scheduler holds: its work item and its sequences."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self

from pagewire.services.scheduler.policy.sequence import Sequence, SequenceState
from pagewire.shared.bus import Item
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.attach import Attached
from pagewire.shared.messages.step import Finish
from pagewire.shared.messages.work import WorkItem
from pagewire.shared.telemetry import tracing


class Stage(Enum):
    """The stages of a request; their values are the names of its spans."""

    QUEUE = "queue"
    """It waits in the store for a scheduler."""
    ADMIT = "admit"
    """A scheduler has it; it waits for its first slot."""
    RECOVER = "recover"
    """It was delivered again, or its executor was lost: it waits for a slot to go on in."""
    RUN = "run"
    """At least one of its sequences has a slot."""
    PREEMPTED = "preempted"
    """Older requests have got its blocks: it waits for a slot to go on in."""
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Request:
    """A request from its delivery until its last sequence has ended. So long its item is renewed in the queue."""

    work: WorkItem
    queue: str
    """Queue from which the item was pulled."""
    ack: str
    """Subject that acknowledges the latest delivery."""
    number: int
    """Number of the item in the store."""
    generation: int
    """Number of deliveries of the item, the latest included."""
    trace: str
    """`traceparent` of the request."""
    stored_at: float
    """Unix time at which the queue stored the item."""
    sequences: list[Sequence] = field(default_factory=list)
    """Sequence of each choice, with dense ids, since the request was last attached to its detokenizer."""
    unfinished: set[int] = field(default_factory=set)
    """Ids of the sequences that have not ended."""
    queued: bool = True
    """Whether no sequence of it has had a slot yet."""
    detokenizer: str = ""
    """Instance that has the stream, as far as this scheduler knows."""
    moves: int = 0
    """Number of times that this scheduler has moved the stream to another detokenizer."""
    must_open: bool = False
    """Whether the detokenizer may not have the stream: the next `Attach` brings its opening then."""
    attached_at: tuple[int, float] = (0, 0.0)
    """Term and monotonic time of the last answer of the detokenizer that it has the stream."""
    sent: tuple[int, ...] = ()
    """Tokens per choice that the client has certainly got from earlier detokenizers; empty: unknown."""
    attaching: int = 0
    """Exchanges with a detokenizer that are going on."""
    attach_again: bool = False
    """Whether the detokenizer needs all tokens once more when the present exchange has ended."""
    slot_at: float = 0.0
    """Monotonic time of its first slot; 0: it had none yet."""
    queue_time: float = 0.0
    """Seconds from the storing of its item to its first slot."""
    first_token_at: float = 0.0
    """Monotonic time at which its first token was read; 0: not yet."""
    stage: Stage = Stage.QUEUE
    stage_began: float = 0.0
    """Unix time in seconds at which the stage began."""
    ended_at: tuple[int, int] | None = None
    """Term and step of its last token, once all sequences have ended on the device."""

    def __post_init__(self) -> None:
        self.detokenizer = self.work.detokenizer
        self.stage_began = self.stored_at

    @classmethod
    def of(cls, item: Item, work: WorkItem, queue: str) -> Self:
        """Returns the request `work` of an item of a queue."""
        trace = item.headers.get("traceparent", "")
        return cls(work, queue, item.ack, item.number, item.deliveries, trace, item.stored_at)

    def note_delivery(self, item: Item, work: WorkItem, queue: str) -> bool:
        """Notes another delivery, of the same item or of a later one in any queue; returns whether its client has
        another detokenizer now. A queue that delivers anew counts deliveries from 1 again."""
        moved = work.detokenizer != self.work.detokenizer
        if moved:
            self.detokenizer, self.must_open = work.detokenizer, False
            self.moves += 1
        self.work, self.queue, self.stored_at = work, queue, item.stored_at
        self.ack, self.number = item.ack, item.number
        self.generation = max(self.generation, item.deliveries)
        return moved

    @property
    def num_choices(self) -> int:
        """Completions of all prompts together."""
        return len(self.work.prompts) * self.work.n

    @property
    def num_generated(self) -> int:
        """Tokens of all choices that are known here."""
        return sum([len(sequence.tokens) - sequence.num_prompt_tokens for sequence in self.sequences])

    @property
    def reports(self) -> bool:
        """Whether log-probabilities are reported, of generated tokens or of the prompts."""
        return self.work.sampling.logprobs >= 0 or self.work.sampling.prompt_logprobs >= 0

    def generated(self) -> tuple[bytes, ...]:
        """Returns the packed tokens generated so far, per choice."""
        if not self.sequences:
            return (b"",) * self.num_choices
        return tuple(pack(s.tokens[s.num_prompt_tokens :]) for s in self.sequences)

    def scores(self) -> dict[str, Any]:
        """Returns the fields of an `Attach` that only a beam search has: the log-probabilities of its texts."""
        if not self.work.sampling.beam_width or not self.sequences:
            return {}
        return {
            "cumulative_logprobs": tuple(s.cumulative_logprob for s in self.sequences),
            "logprobs": tuple(tuple(s.reported) for s in self.sequences),
        }


def sequences_of(request: Request, first_id: int, answer: Attached, arrival_order: int) -> list[Sequence]:
    """Returns one sequence per choice, with the longer of the two lists of known tokens: ours or the detokenizer's.

    If log-probabilities are reported, only the detokenizer's tokens count: it has the log-probabilities of no others.

    Choices that have ended, here or at the detokenizer, are in the state FINISHED.
    """
    work = request.work
    ended = set(unpack(answer.ended))
    stop_ids = set(unpack(work.sampling.stop_ids))
    prompts = [unpack(prompt) for prompt in work.prompts]
    sequences = []
    finishes = [sequence.finish for sequence in request.sequences] or [Finish.NONE] * request.num_choices
    for index, (ours, theirs) in enumerate(zip(request.generated(), answer.tokens, strict=True)):
        generated = unpack(theirs if request.reports else max(ours, theirs, key=len))
        prompt = prompts[index // work.n]
        sequence = Sequence(
            id=first_id + index,
            tokens=prompt + generated,
            num_prompt_tokens=len(prompt),
            sampling=work.sampling,
            prompt_index=index // work.n,
            choice_index=index % work.n,
            priority=work.priority,
            arrival_order=arrival_order,
            arrival_time=request.stored_at,
            deadline=work.deadline,
            user=work.user,
            cache_salt=work.cache_salt,
            adapter=work.adapter,
            trace=request.trace if tracing.records(request.trace) else "",
            finish=Finish.NONE if request.reports and len(theirs) < len(ours) else finishes[index],
        )
        stopped = len(generated) > work.sampling.min_tokens and generated[-1] in stop_ids
        if index in ended or sequence.finish or stopped or len(generated) >= work.sampling.max_tokens:
            sequence.state = SequenceState.FINISHED
        sequences.append(sequence)
    return sequences
