"""Tokenizer to detokenizer: who will speak to the client, agreed before the work is stored."""

from enum import IntEnum

from pagewire.shared.messages.codec import Wire


class Encoding(IntEnum):
    """How frames to the client are encoded."""

    JSON = 0
    """Unless the request said otherwise."""
    MSGPACK = 1
    """The request's `Content-Type` was application/msgpack."""


class OpenStream(Wire, frozen=True):
    """Opens the client's stream. The detokenizer answers `accepted` to the client from here on."""

    request_id: str
    """Chosen by the client, or drawn."""
    digest: bytes
    """Fingerprint of the request's body: the same id with another body is refused."""
    reply: str
    """The client's inbox."""
    encoding: int
    """An `Encoding`."""
    stream: bool
    """Frames as they come, or one result."""
    prompts: tuple[bytes, ...]
    """The last ids of each prompt, packed: context that the first characters of the text depend on."""
    prompt_lengths: bytes
    """Packed length of each prompt: the position of the first token of its completions, and for `usage`."""
    n: int
    """Completions per prompt. Choice `p * n + c` is completion c of prompt p."""
    stop: tuple[str, ...]
    """Stop strings."""
    stop_token_ids: tuple[int, ...]
    """Stop tokens that the client named, reported as `stop_reason`."""
    include_stop: bool
    """Whether what stopped the text stays in the text."""
    skip_special: bool
    """Whether special tokens are left out of the text."""
    min_tokens: int
    """Tokens before which no stop string counts."""
    timeout_ms: int
    """What is left of the deadline on arrival here."""
    fresh: bool = False
    """The id was drawn for this request, which comes for the first time: there is no record of it to look for."""
    batch_inbox: str = ""
    """Where deltas may come together with those of other streams; empty: nowhere."""


class OpenState(IntEnum):
    """What became of an `OpenStream`."""

    OPENED = 0
    """A new stream: the tokenizer stores the work now."""
    ATTACHED = 1
    """The same request runs or has ended here: its frames go to the new inbox too, nothing is stored."""
    CONFLICT = 2
    """The id is taken by another body: the tokenizer answers 409."""
    FULL = 3
    """Too many streams: the tokenizer answers 429."""


class Opened(Wire, frozen=True):
    """Answer to an `OpenStream`."""

    state: int
    """An `OpenState`."""


class AbortStream(Wire, frozen=True):
    """The work cannot be done, for instance because the queue did not take it: the stream ends with this error."""

    request_id: str
    error: str
    """Name of the error, as `pagewire.shared.errors` has it."""
    message: str
    """What the client is told."""
