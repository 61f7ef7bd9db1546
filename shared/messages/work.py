"""Tokenizer to scheduler, through the work queue: a request, which is durable once it is queued."""

from pagewire.shared.messages.codec import Wire
from pagewire.shared.sampling_parameters import pack_record

GREEDY = pack_record()
"""A record of `pagewire.shared.sampling_parameters` in which every parameter is neutral."""


class Sampling(Wire, frozen=True):
    """The sampling parameters of a request, with all defaults filled in."""

    max_tokens: int
    """Maximum number of generated tokens."""
    record: bytes = GREEDY
    """Scalar parameters as a `shared.sampling_parameters` record, without the columns that depend on a sequence."""
    stop_ids: bytes = b""
    """Packed ids that end a sequence: the model's EOS ids unless ignored, and the request's stop ids."""
    min_tokens: int = 0
    """Number of generated tokens before which `stop_ids` cannot be sampled."""
    seed: int = 0
    """Seed of the random numbers, 64 bits, unsigned."""
    beam_width: int = 0
    """Number of beams; 0: no beam search."""
    length_penalty: float = 1.0
    """Exponent of the length by which the score of an ended beam is divided."""
    candidates: int = 0
    """Number of most likely tokens that every row reports for beam search; 0: none."""
    bias_ids: bytes = b""
    """Packed ids whose logits get a bias, each once."""
    biases: bytes = b""
    """Bias of each of `bias_ids`, packed little-endian float32."""
    allowed_ids: bytes = b""
    """Packed ids of the only tokens that may be sampled, each once; empty: all."""
    logprobs: int = -1
    """Number of the likeliest tokens whose log-probabilities are reported beside that of each sampled token; -1: no
    log-probabilities."""
    prompt_logprobs: int = -1
    """Number as in `logprobs`, for each token of the prompt but the first; -1: no log-probabilities."""
    bad_words: bytes = b""
    """Texts that may not be generated, packed: the number of ids of each, followed by its ids."""
    grammar: str = ""
    """Grammar of the text, as `pagewire.shared.grammar_compiler` compiles it; empty: none."""


class WorkItem(Wire, frozen=True):
    """A queued request. Its trace context is in the message's headers."""

    request_id: str
    """Id of the request; the same id is never admitted twice."""
    detokenizer: str
    """Instance id of the detokenizer that has the client's stream."""
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
    """User of the request, `subjects.owned` by the client's tenant: users of the same priority get equal shares."""
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes; `subjects.owned` by the client's tenant."""
    opening: bytes = b""
    """Encoded `OpenStream` of the request, with which another detokenizer adopts the stream; empty: none can."""
    adapter: str = ""
    """Hash of the adapter's content, which is also in `cache_salt`; empty: there is none."""
