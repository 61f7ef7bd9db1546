"""One request as its clients see it: its completions, its subscribers, and its record."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from opentelemetry.trace import INVALID_SPAN, Span

from pagewire.services.detokenizer.state.completion import Completion, StreamedChoice
from pagewire.services.detokenizer.state.outcome import Times, best_completions
from pagewire.shared import subjects
from pagewire.shared.client_protocol.frame_encoding import encoder
from pagewire.shared.errors import RequestError
from pagewire.shared.messages import pack
from pagewire.shared.messages.attach import Attach
from pagewire.shared.messages.client import Accepted, ChatFormat, Delta
from pagewire.shared.messages.done import Done, DoneChoice, TokenLogprobs


class StreamState(Enum):
    """State of a stream.

                 attach, apply
                    ┌────┐
                    │    ▼
        open ─────▶ OPEN ── finish, cancel, abort ──▶ FINALIZING ── record stored ──▶ ENDED ◀── restore

    `finish`: every completion has ended. `cancel`: a client asked for it, or the last client has disconnected; the
    completions end where they are. `abort`: the request ends with an error, such as its deadline. A stream that another
    detokenizer goes on with is dropped: it stays OPEN, and nobody has it here any more.
    """

    OPEN = auto()
    """The request waits or runs."""
    FINALIZING = auto()
    """The request is over and its record is being stored: no subscriber gets the last frame yet."""
    ENDED = auto()
    """The last frame may be sent."""


@dataclass(slots=True, eq=False)
class Stream:
    """The completions of a request, its subscribers, and how it ended."""

    request_id: str
    """As services know it: `subjects.owned` by the tenant."""
    digest: bytes
    """Fingerprint of the request's body."""
    completions: Sequence[Completion]
    """`StreamedChoice`s, unless the stream was restored from its record."""
    prompt_tokens: int
    cached_tokens: int = 0
    state: StreamState = StreamState.OPEN
    error: RequestError | None = None
    """The error that ended the request."""
    subscribers: "list[Subscriber]" = field(default_factory=list)
    """Those that have not got every frame yet."""
    attachment: Attach | None = None
    """Which sequences the request is, once a scheduler has admitted it."""
    deadline: asyncio.TimerHandle | None = None
    delivered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the last subscriber has got every frame."""
    span: Span = INVALID_SPAN
    adopted: bool = False
    """Another detokenizer had the stream before."""
    stored: bool = False
    """The work queue has the request, as its tokenizer says or was seen."""
    opened_at: float = field(default_factory=time.monotonic)
    first_token_at: float = 0.0
    """When the step with its first token was read, in monotonic seconds; 0: none was read here."""
    incomplete: bool = False
    """Tokens are missing; they were asked for, and rows behind them are dropped."""
    prompts: tuple[bytes, ...] = ()
    """Packed ids of each prompt, if the request asks for log-probabilities of prompts."""
    restored_prompt_logprobs: tuple[tuple[TokenLogprobs | None, ...], ...] = ()
    """Those of a stream that was restored from its record."""
    lost_schedulers: int = 0
    """Schedulers in a row that have had the request, and from which no new token has come."""
    _tokens_before: int = 0
    """Tokens when a scheduler was lost last."""
    secret: bytes = b""
    """Ends the subjects that cancel and resume the stream."""
    chat_format: ChatFormat | None = None
    """What clients are told of the format of the texts."""
    best: int = 0
    """Completions of each prompt that the client gets, the best ones; 0: all."""
    num_prompts: int = 1
    hides_logprobs: bool = False
    """Whether log-probabilities of tokens are reported only to find the best."""
    times: Times = field(default_factory=lambda: Times(0.0))

    @property
    def tenant(self) -> str:
        """The tenant whose request it is; empty: that of a client that is no tenant."""
        return subjects.owner_and_text(self.request_id)[0]

    @property
    def public_id(self) -> str:
        """The request id as the client knows it."""
        return subjects.owner_and_text(self.request_id)[1]

    @property
    def accepted(self) -> bool:
        """Whether the client may be told that the request waits or runs: the work queue has had it."""
        return self.stored or self.adopted or self.attachment is not None or self.state is not StreamState.OPEN

    @property
    def attached_by(self) -> tuple[int, int, int]:
        """Generation, term and move of the last attachment, which are higher for a newer one; zeros without one."""
        last = self.attachment
        return (0, 0, 0) if last is None else (last.generation, last.term, last.move)

    def note_lost_scheduler(self) -> None:
        """Counts a scheduler that was lost with this request."""
        self.lost_schedulers = 1 if self.tokens > self._tokens_before else self.lost_schedulers + 1
        self._tokens_before = self.tokens

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(completion.tokens) for completion in self.completions)

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(completion.finish is not None for completion in self.completions)

    @property
    def prompt_logprobs(self) -> tuple[tuple[TokenLogprobs | None, ...], ...]:
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
        """Returns what is stored of the request when it is over."""
        choices = tuple(
            DoneChoice(
                pack(done.tokens),
                tuple(done.texts),
                done.finish or "cancelled",
                done.stop_reason,
                None if done.logprobs is None or self.hides_logprobs else tuple(done.logprobs),
                done.score,
            )
            for done in (self.returned if self.error is None else ())
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


class Subscriber:
    """One client inbox and its position in the stream. Frames are made when they are sent, so none are stored here.

    Attributes:
        encoding: the `Encoding` of its frames.
        encode: makes the bytes of a frame.
        batch_inbox: where its deltas may be sent together with those of other streams; empty: nowhere.
        batch: that inbox and the encoding: equal for subscribers whose deltas go into one message.
        accepted: the first frame, until it is sent.
        positions: per completion, the position of the next token to send.
        queued: whether it waits for its turn in the `FrameSender`.
        closed: whether it gets no more frames.
        probe: reply subject of the next frame, which asks whether the inbox has a listener; empty: the frame asks not.
        probes: frames with a reply subject that were sent since the inbox last had a listener.
        undelivered: how many of those the broker reported as having no listener.
    """

    __slots__ = (
        "accepted",
        "batch",
        "batch_inbox",
        "closed",
        "encode",
        "encoding",
        "positions",
        "probe",
        "probes",
        "queued",
        "reply",
        "stream",
        "streaming",
        "undelivered",
    )

    def __init__(
        self,
        stream: Stream,
        reply: str,
        encoding: int,
        *,
        streaming: bool,
        start: int = 0,
        sent: Sequence[int] = (),
        accepted: Accepted | None = None,
        batch_inbox: str = "",
    ) -> None:
        """`start`: position in each completion of the first token wanted; `sent`: one such position per completion."""
        self.stream = stream
        self.reply = reply
        self.streaming = streaming
        self.encoding = encoding
        self.encode = encoder(encoding)
        self.batch_inbox = batch_inbox
        self.batch = batch_inbox, encoding
        self.accepted = accepted
        self.positions = list(sent) or [start] * len(stream.completions)
        self.queued = False
        self.closed = False
        self.probe = ""
        self.probes = 0
        self.undelivered = 0

    def rewind(self, start: int, accepted: Accepted | None = None) -> None:
        """Makes the frames from position `start` on due again; frames that were not sent yet stay due."""
        self.accepted = accepted or self.accepted
        self.positions = [min(position, start) for position in self.positions]

    def put_back(self, delta: Delta) -> None:
        """Makes a delta that could not be sent due again."""
        self.positions[delta.index] = min(self.positions[delta.index], delta.start)
