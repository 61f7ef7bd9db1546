"""The stored record of an ended request, kept for two minutes so that no request is generated twice."""

from typing import Literal, NamedTuple

from pagewire.shared.messages.client import ChatFormat
from pagewire.shared.messages.codec import Wire


class ReportedLogprobs(NamedTuple):
    """Log-probabilities at the position of one token, as an executor reports them."""

    rank: int
    """Rank of the token, from 1."""
    ids: bytes
    """Packed ids: the token's own, then the likeliest ones, the most likely first."""
    values: bytes
    """Log-probability of each of `ids`, packed little-endian float32."""


class DoneChoice(Wire, frozen=True):
    """One completion as it was sent to the client."""

    tokens: bytes
    """Packed token ids."""
    texts: tuple[str, ...]
    """Text of each token's frame; joined, the text of the completion."""
    finish_reason: Literal["stop", "length", "cancelled"]
    """Why the completion ended."""
    stop_reason: str | int | None
    """Stop string or stop token that ended the completion, as it was sent to the client."""
    logprobs: tuple[ReportedLogprobs, ...] | None = None
    """Log-probabilities of each token; None if the request does not ask for them."""
    score: float | None = None
    """Cumulative log-probability of a completion that a beam search has found."""


class Done(Wire, frozen=True):
    """How a request ended."""

    request_id: str
    """Id of the request, and key of the record."""
    digest: bytes
    """Fingerprint of the request's body, which distinguishes a repetition from a conflict."""
    choices: tuple[DoneChoice, ...]
    """Completions that the client gets; empty when the request ended with an error."""
    prompt_tokens: int
    """Tokens of all prompts, for the usage."""
    cached_tokens: int
    """Prompt tokens that were cached, for the usage."""
    error: str
    """Kind of the error that ended the request; empty: none."""
    message: str
    """Message of that error."""
    secret: bytes = b""
    """`OpenStream.secret` of the request."""
    prompts: tuple[bytes, ...] = ()
    """Packed ids of each prompt, if the answer has them or log-probabilities of prompts."""
    prompt_logprobs: tuple[tuple[ReportedLogprobs | None, ...], ...] = ()
    """Log-probabilities of each token of each prompt; None for the first tokens."""
    chat_format: ChatFormat | None = None
    """`OpenStream.chat_format` of the request."""
    times: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Unix times of arrival, first step, first token and end; 0: unknown."""
