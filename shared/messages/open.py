"""Tokenizer to detokenizer: opens the client's stream before the request is queued."""

from enum import IntEnum

from pagewire.shared.messages.client import ChatFormat
from pagewire.shared.messages.codec import Wire


class Encoding(IntEnum):
    """How frames to the client are encoded."""

    JSON = 0
    """The default."""
    MSGPACK = 1
    """The request's `Content-Type` was application/msgpack."""


class OpenStream(Wire, frozen=True):
    """Opens the client's stream. From then on the detokenizer sends all frames to the client."""

    request_id: str
    """Id chosen by the client, or a random one; `subjects.owned` by the client's tenant, as in all other messages."""
    digest: bytes
    """Fingerprint of the request's body: the same id with a different body is refused."""
    reply: str
    """The client's inbox."""
    encoding: int
    """An `Encoding`."""
    stream: bool
    """Whether to send a frame per token instead of one result."""
    prompts: tuple[bytes, ...]
    """Packed last ids of each prompt, the context in which the first characters of the text are decoded. All ids, if
    log-probabilities of prompts are reported or the ids are part of the answer."""
    prompt_lengths: bytes
    """Packed length of each prompt: the position of the first generated token, and part of the usage."""
    n: int
    """Completions per prompt. Choice `p * n + c` is completion c of prompt p."""
    stop: tuple[str, ...]
    """Stop strings."""
    stop_token_ids: tuple[int, ...]
    """Stop tokens of the request, reported as `stop_reason`."""
    include_stop: bool
    """Whether the stop string or stop token is part of the text."""
    skip_special: bool
    """Whether special tokens are left out of the text."""
    min_tokens: int
    """Number of tokens before which stop strings are ignored."""
    timeout_ms: int
    """Time left until the deadline, in milliseconds from arrival."""
    fresh: bool = False
    """Whether the request is sent for the first time with a random id, so that no record of it can exist."""
    batch_inbox: str = ""
    """Inbox for deltas of several streams in one message; empty: none."""
    deadline: float = 0.0
    """Unix time in seconds at which the request expires, for a detokenizer that opens the stream later; 0: unknown."""
    joins: bool = False
    """Whether the stream is opened only if the detokenizer knows the request: the server takes no new ones now."""
    secret: bytes = b""
    """Last token of the subjects that cancel and resume the stream: 128 bits that follow from the request and its id,
    and that only its clients learn."""
    logprobs: bool = False
    """Whether log-probabilities of tokens are reported."""
    prompt_logprobs: bool = False
    """Whether log-probabilities of the prompts' tokens are reported."""
    chat_format: ChatFormat | None = None
    """Format of tool calls and reasoning in the texts, which the client is told; None: there are none."""
    best: int = 0
    """Number of completions of each prompt that the client gets, the ones with the highest cumulative log-probability
    of the `n`; 0: all."""
    hides_logprobs: bool = False
    """Whether log-probabilities of tokens are reported only to find the best, and are no part of the answer."""
    return_token_ids: bool = False
    """Whether the ids of the prompts are part of the answer: `prompts` has all of them."""
    return_token_origins: bool = False
    """Whether frames say how their tokens came."""
    adapter: str = ""
    """Name of the adapter that the request asks for; empty: there is none."""


class OpenState(IntEnum):
    """Result of an `OpenStream`."""

    OPENED = 0
    """The stream is new: the tokenizer queues the request."""
    ATTACHED = 1
    """The stream is there or has ended: its frames go to the new inbox too, and nothing is queued."""
    CONFLICT = 2
    """A request with another body has the id: the tokenizer answers 409."""
    FULL = 3
    """There are too many streams: the tokenizer answers 429."""
    UNAVAILABLE = 4
    """The store does not say whether the request is known: the tokenizer answers 503."""
    ABSENT = 5
    """The request is not known here, and `OpenStream.joins` forbids a new stream: the tokenizer answers 503 or 429."""
    WAITING = 6
    """The same inbox has the stream, as when a tokenizer asks twice, and no scheduler has the request yet: the
    tokenizer queues it, unless it knows that it is queued."""


class Opened(Wire, frozen=True):
    """Reply to an `OpenStream`."""

    state: int
    """An `OpenState`."""


class StoredWork(Wire, frozen=True):
    """Says that the work queue has the request of a stream, so that its client may be told that it is accepted."""

    request_id: str
    """Id of the request."""
    number: int = 0
    """Number of the work item, as the store has returned it; 0: unknown."""


class AbortStream(Wire, frozen=True):
    """Ends a stream with an error, for instance because the request could not be queued."""

    request_id: str
    """Id of the request."""
    error: str
    """`kind` of the error in `pagewire.shared.errors`."""
    message: str
    """Message of the error for the client."""
    unless_accepted: bool = False
    """Whether a stream goes on whose request is in a queue: its sender, another attempt to send it, cannot know."""
