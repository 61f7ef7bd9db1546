"""Tokenizer to work queue: a request, which is durable once it is queued."""

from pagewire.shared.messages.codec import Wire


class Sampling(Wire, frozen=True):
    """How the device samples the tokens of one request. All defaults have been filled in."""

    temperature: float
    """0: greedy."""
    top_p: float
    """In (0, 1]."""
    top_k: int
    """0: all tokens."""
    min_p: float
    """In [0, 1]."""
    seed: int
    """Unsigned 64 bits."""
    stop_ids: bytes
    """Packed ids that end a sequence: the model's EOS ids unless ignored, and the request's own."""
    min_tokens: int
    """Number of generated tokens before which no token of `stop_ids` is sampled."""
    max_tokens: int
    """Maximum number of generated tokens."""
    beam_width: int = 0
    """Number of beams; 0: no beam search."""
    length_penalty: float = 1.0
    """Exponent of the length by which the score of an ended beam is divided."""
    candidates: int = 0
    """Number of likeliest tokens that every row reports, for the scheduler to choose from; 0: none."""


class WorkItem(Wire, frozen=True):
    """A queued request. Its trace context is in the message's headers."""

    request_id: str
    """Id of the request; the same id is never admitted twice."""
    detokenizer: str
    """Instance that has the client's stream."""
    prompts: tuple[bytes, ...]
    """Packed token ids of each prompt."""
    n: int
    """Completions per prompt."""
    sampling: Sampling
    """How tokens are sampled."""
    priority: int
    """Requests with lower values run earlier."""
    deadline: float
    """Unix time in seconds at which the request expires."""
    user: str = ""
    """User of the request, as the client names it: users of the same priority get equal shares."""
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes."""
