"""A request that this scheduler holds: its work item and its sequences."""

from dataclasses import dataclass, field

from pagewire.services.scheduler.sequence import Sequence, State
from pagewire.shared.bus import Item
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.attach import Attached
from pagewire.shared.messages.step import Finish
from pagewire.shared.messages.work import WorkItem


@dataclass(slots=True, eq=False)
class Request:
    """Owned by the scheduler from its delivery until its last sequence has ended, and renewed in the queue as long."""

    work: WorkItem
    queue: str
    """That it was pulled from."""
    ack: str
    """Of the latest delivery."""
    generation: int
    """Number of the latest delivery."""
    trace: str
    """`traceparent` of the request."""
    stored_at: float
    """Unix time at which the queue took it."""
    sequences: list[Sequence] = field(default_factory=list)
    """One per choice, of the last attachment."""
    live: set[int] = field(default_factory=set)
    """Ids of those that are not over."""
    queued: bool = True
    """No token of it has been scheduled yet."""

    @property
    def waits(self) -> bool:
        """Whether it is attached and none of it has had a slot."""
        return self.queued and bool(self.live)

    @property
    def choices(self) -> int:
        """Completions in all."""
        return len(self.work.prompts) * self.work.n

    def find(self, sequence: int) -> Sequence:
        """One of its sequences, by id."""
        return self.sequences[sequence - self.sequences[0].id]

    def generated(self) -> tuple[bytes, ...]:
        """Per choice, the tokens known so far, packed."""
        if not self.sequences:
            return (b"",) * self.choices
        return tuple(pack(s.tokens[s.prompt_tokens :]) for s in self.sequences)


def accept(queue: str, item: Item, work: WorkItem) -> Request:
    """The request of a delivery."""
    return Request(work, queue, item.ack, item.deliveries, item.headers.get("traceparent", ""), item.stored_at)


def sequences_of(request: Request, first_id: int, answer: Attached, arrival: int) -> list[Sequence]:
    """The sequences of a request after its attachment: per choice the longer of the two lists of known tokens.

    Choices that are over, here or at the detokenizer, come back as finished.
    """
    work = request.work
    ended = set(unpack(answer.ended))
    stop_ids = set(unpack(work.sampling.stop_ids))
    prompts = [unpack(prompt) for prompt in work.prompts]
    sequences = []
    finishes = [sequence.finish for sequence in request.sequences] or [Finish.NONE] * request.choices
    for index, (ours, theirs) in enumerate(zip(request.generated(), answer.tokens, strict=True)):
        known = unpack(max(ours, theirs, key=len))
        prompt = prompts[index // work.n]
        sequence = Sequence(
            id=first_id + index,
            tokens=prompt + known,
            prompt_tokens=len(prompt),
            sampling=work.sampling,
            prompt_index=index // work.n,
            choice_index=index % work.n,
            priority=work.priority,
            arrival=arrival,
            arrived=request.stored_at,
            deadline=work.deadline,
            user=work.user,
            cache_salt=work.cache_salt,
            trace=request.trace,
            finish=finishes[index],
        )
        stopped = len(known) > work.sampling.min_tokens and known[-1] in stop_ids
        if index in ended or sequence.finish or stopped or len(known) >= work.sampling.max_tokens:
            sequence.state = State.FINISHED
        sequences.append(sequence)
    return sequences
