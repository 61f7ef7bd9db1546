"""One request as its clients see it: its completions, its subscribers, and its record."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto

from opentelemetry.trace import INVALID_SPAN, Span

from pagewire.services.detokenizer.state.completion import Completion, StreamedChoice
from pagewire.services.detokenizer.state.outcome import DraftCounts, Times, best_completions
from pagewire.shared import subjects
from pagewire.shared.client_protocol.frame_encoding import Reply, encoder
from pagewire.shared.errors import RequestError, Unavailable
from pagewire.shared.messages import pack
from pagewire.shared.messages.attach import Attach
from pagewire.shared.messages.client import Accepted, ChatFormat, Delta
from pagewire.shared.messages.done import Done, DoneChoice, ReportedLogprobs
from pagewire.shared.process.peers import Peers


class StreamState(Enum):
    """State of a stream that this detokenizer owns.

                 attach, apply
                    ┌────┐
                    │    ▼
        open ─────▶ OPEN ── finish, cancel, abort ──▶ FINALIZING ── record stored ──▶ ENDED ◀── restore

    `finish`: every completion has ended. `cancel`: a client asked for it, or the last client has disconnected; the
    completions end where they are. `abort`: the request ends with an error, such as its deadline. `restore`: the stream
    is rebuilt from its record. A stream that another detokenizer owns now is dropped: its state stays OPEN.
    """

    OPEN = auto()
    """The request waits or runs."""
    FINALIZING = auto()
    """The request is over, and its record is being stored: the last frame waits for that."""
    ENDED = auto()
    """The last frame may be sent."""


@dataclass(slots=True, eq=False)
class Stream:
    """The completions of a request, its subscribers, and how it ended."""

    request_id: str
    """Id as services know it: `subjects.owned` by the tenant."""
    digest: bytes
    """Fingerprint of the request's body."""
    completions: Sequence[Completion]
    """`StreamedChoice`s, unless the stream was restored from its record."""
    prompt_tokens: int
    """Tokens of all prompts."""
    cached_tokens: int = 0
    """Prompt tokens that the executor had cached."""
    state: StreamState = StreamState.OPEN
    error: RequestError | None = None
    """Error that ended the request; None: it runs or has ended without one."""
    subscribers: "list[Subscriber]" = field(default_factory=list)
    """Inboxes that have not received every frame yet."""
    attachment: Attach | None = None
    """Sequences of the request, once a scheduler has admitted it."""
    deadline: asyncio.TimerHandle | None = None
    """Timer that aborts the request; None in a restored stream."""
    delivered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the last subscriber has received every frame."""
    span: Span = INVALID_SPAN
    adopted: bool = False
    """Whether another detokenizer owned the stream before."""
    stored: bool = False
    """Whether the work queue is known to have the request."""
    number: int = 0
    """Number of the request's work item, as the store has returned it; 0: unknown."""
    opened_at: float = field(default_factory=time.monotonic)
    """Time at which the stream was opened here, in monotonic seconds."""
    first_token_at: float = 0.0
    """Time at which the step with the first token was read, in monotonic seconds; 0: it was not read here."""
    incomplete: bool = False
    """Whether tokens are missing and were asked for: rows behind them are dropped."""
    prompts: tuple[bytes, ...] = ()
    """Packed ids of each prompt, if the answer has them or log-probabilities of prompts."""
    restored_prompt_logprobs: tuple[tuple[ReportedLogprobs | None, ...], ...] = ()
    """Log-probabilities of prompts in a restored stream."""
    _former_schedulers: set[str] = field(default_factory=set)
    """Schedulers that have had the request since its last new token, except those that have drained."""
    _tokens_before: int = 0
    """Number of tokens when another scheduler took the request last."""
    secret: bytes = b""
    """Last token of the subjects that cancel and resume the stream."""
    chat_format: ChatFormat | None = None
    """Format of tool calls and reasoning in the texts, which clients are told."""
    best: int = 0
    """Number of completions of each prompt that the client gets, the best ones; 0: all."""
    adapter: str = ""
    """Name of the adapter that the request asks for; empty: there is none, or the stream was restored."""
    num_prompts: int = 1
    hides_logprobs: bool = False
    """Whether log-probabilities of tokens are reported only to find the best completions."""
    refused: bool = False
    """Whether an error has ended the request before it was accepted here. It may run elsewhere, sent before."""
    abandoned: bool = False
    """Whether the request was cancelled because no client was there to read it."""
    times: Times = field(default_factory=lambda: Times(0.0))
    drafts: DraftCounts = field(default_factory=DraftCounts)
    """Drafted tokens of the request, as far as this detokenizer has read its steps."""

    @property
    def tenant(self) -> str:
        """Tenant that owns the request; empty for a client that is no tenant."""
        return subjects.owner_and_text(self.request_id)[0]

    @property
    def public_id(self) -> str:
        """Request id as the client knows it."""
        return subjects.owner_and_text(self.request_id)[1]

    @property
    def accepted(self) -> bool:
        """Whether the client may be told that its request waits or runs: the work queue has had it."""
        return self.stored or self.adopted or self.attachment is not None or self.state is not StreamState.OPEN

    @property
    def may_start_again(self) -> bool:
        """Whether the request has ended without an answer, so that it runs anew if it is sent again."""
        return self.state is not StreamState.OPEN and (self.abandoned or isinstance(self.error, Unavailable))

    def count_lost_schedulers(self, former: str, peers: Peers) -> int:
        """Notes the scheduler from which another one has taken the request; returns how many of them have ended.

        Only those since the last new token count. A live one was late, and one that drains has given the request up.
        """
        if self.tokens > self._tokens_before:
            self._former_schedulers.clear()
        self._tokens_before = self.tokens
        beat = peers.find(former)
        if beat is None or not beat.draining:
            self._former_schedulers.add(former)
        return sum(map(peers.gone, self._former_schedulers))

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(completion.tokens) for completion in self.completions)

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(completion.finish is not None for completion in self.completions)

    @property
    def prompt_logprobs(self) -> tuple[tuple[ReportedLogprobs | None, ...], ...]:
        """Log-probabilities of the tokens of each prompt; empty if the request does not ask for them."""
        reporting = (choice.prompt_logprobs for choice in self.choices if choice.prompt_logprobs)
        return self.restored_prompt_logprobs or tuple(map(tuple, reporting))

    @property
    def choices(self) -> list[StreamedChoice]:
        """The completions of an open stream."""
        return [completion for completion in self.completions if isinstance(completion, StreamedChoice)]

    @property
    def returned(self) -> Sequence[Completion]:
        """The completions that the client gets."""
        return best_completions(self.completions, self.num_prompts, self.best) if self.best else self.completions

    def find_subscriber(self, reply: str) -> "Subscriber | None":
        """Returns the subscriber with that inbox."""
        return next((subscriber for subscriber in self.subscribers if subscriber.reply == reply), None)

    def unsubscribe(self, subscriber: "Subscriber") -> None:
        """Removes a subscriber that has got every frame, or gets no more of them."""
        subscriber.closed = True
        if subscriber in self.subscribers:
            self.subscribers.remove(subscriber)
        if not self.subscribers:
            self.delivered.set()

    def record(self) -> Done:
        """Returns the record of a request that is over; `restore` makes a stream of it again."""
        choices = tuple(
            DoneChoice(
                pack(completion.tokens),
                tuple(completion.texts),
                completion.finish or "cancelled",
                completion.stop_reason,
                None if completion.logprobs is None or self.hides_logprobs else tuple(completion.logprobs),
                completion.score,
            )
            for completion in (self.returned if self.error is None else ())
        )
        return Done(
            request_id=self.request_id,
            digest=self.digest,
            choices=choices,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            error=self.error.kind if self.error is not None else "",
            message=self.error.message if self.error is not None else "",
            secret=self.secret,
            prompts=self.prompts,
            prompt_logprobs=self.prompt_logprobs,
            chat_format=self.chat_format,
            times=self.times.packed(),
        )


@dataclass(slots=True, eq=False)
class Subscriber:
    """One client inbox and its position in the stream. Frames are made when they are sent, so none are kept here."""

    stream: Stream
    reply: str
    """The inbox."""
    encoding: int
    """`Encoding` of its frames."""
    streaming: bool
    """Whether it gets a frame per token, not only the result."""
    start: InitVar[int] = 0
    """Position of the first token to send in every completion."""
    sent: InitVar[Sequence[int]] = ()
    """Position of the first token to send per completion; empty: `start` in all."""
    accepted: Accepted | None = None
    """First frame, until it is sent."""
    batch_inbox: str = ""
    """Inbox for its deltas together with deltas of other streams; empty: none."""
    positions: list[int] = field(init=False)
    """Position of the next token to send, per completion."""
    encode: Callable[[Reply], bytes] = field(init=False)
    """Returns the bytes of a frame."""
    batch: tuple[str, int] = field(init=False)
    """`batch_inbox` and `encoding`: equal for subscribers whose deltas go into one message."""
    queued: bool = False
    """Whether it waits for its turn in the `FrameSender`."""
    closed: bool = False
    """Whether it gets no more frames."""
    probe: str = ""
    """Reply subject of the next frame, at which the broker answers if the inbox has no listener; empty: none."""
    probes: int = 0
    """Number of frames with a reply subject since the inbox last had a listener."""
    undelivered: int = 0
    """Number of these frames that the broker reported as having no listener."""

    def __post_init__(self, start: int, sent: Sequence[int]) -> None:
        self.positions = list(sent) or [start] * len(self.stream.completions)
        self.encode = encoder(self.encoding)
        self.batch = self.batch_inbox, self.encoding

    def rewind(self, start: int, accepted: Accepted | None = None) -> None:
        """Makes the frames from position `start` on due again. Frames that were not sent yet stay due."""
        self.accepted = accepted or self.accepted
        self.positions = [min(position, start) for position in self.positions]

    def put_back(self, delta: Delta) -> None:
        """Makes a delta that could not be sent due again."""
        self.positions[delta.index] = min(self.positions[delta.index], delta.start)
