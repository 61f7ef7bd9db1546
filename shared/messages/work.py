"""Tokenizer to work queue: a request that will not be lost from here on."""

from pagewire.shared.messages.codec import Wire
from pagewire.shared.sampling import record

GREEDY = record().tobytes()
"""A record of `pagewire.shared.sampling` in which every parameter is neutral."""


class Sampling(Wire, frozen=True):
    """How the device picks tokens for one request, resolved: nothing is left to be filled in from defaults."""

    max_tokens: int
    """Generated tokens at most."""
    record: bytes = GREEDY
    """The scalar parameters: a record of `pagewire.shared.sampling`, without the columns that depend on a sequence."""
    stop_ids: bytes = b""
    """Packed ids that end a sequence: the model's EOS set unless ignored, and the request's own."""
    min_tokens: int = 0
    """Generated tokens before which `stop_ids` cannot be picked."""
    seed: int = 0
    """64 bits, unsigned."""
    beam_width: int = 0
    """Beams of a beam search; 0: tokens are picked one by one."""
    length_penalty: float = 1.0
    """Exponent of the length in the score of a beam that has ended."""
    candidates: int = 0
    """Likeliest tokens that every row reports, so that the scheduler picks among them; 0: none."""


class WorkItem(Wire, frozen=True):
    """One request in the queue. The trace context is in the message's headers."""

    request_id: str
    """Key of admission: the same id is never admitted twice."""
    detokenizer: str
    """Instance that holds the client's stream."""
    prompts: tuple[bytes, ...]
    """Packed token ids of each prompt."""
    n: int
    """Completions per prompt."""
    sampling: Sampling
    """How tokens are picked."""
    priority: int
    """Lower runs earlier."""
    deadline: float
    """Unix time in seconds after which nobody waits for the result."""
    user: str = ""
    """Who asks, as the client says: users of one priority get fair shares."""
    cache_salt: str = ""
    """Only requests with the same one share cached prefixes."""
