"""Whether a request fits: into the model's context, and into the messages that it will need."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.shared.errors import ContextLength, InvalidRequest, PayloadTooLarge
from pagewire.shared.messages.client import SamplingParams

MAX_SEQUENCES = 256
"""Completions of all prompts of a request together, or their beams."""
HEADROOM = 16 * 1024
"""Bytes left in every message for headers and for the fields that do not grow with the tokens."""
SLOT_BYTES = 5
"""Bytes per token in a plan: the id, and its share of a block table."""
RESULT_BYTES = 24
"""Bytes per token in a result: a JSON id of 8 and text of 16. Ten languages need 5 to 11 together, escapes more."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the bus can take."""

    max_model_len: int
    """Tokens of a prompt and one of its completions together."""
    vocab_size: int
    """Token ids are below this."""
    max_payload: int
    """Bytes of a message."""
    max_new_tokens: int | None = None
    """Tokens to generate where a request names no number; None: what the context leaves."""


def tokens_to_generate(prompt_lengths: Sequence[int], params: SamplingParams, limits: Limits) -> int:
    """`max_tokens` of the request; where it names none, the model's own number, and at most what the context leaves.

    Raises:
        InvalidRequest: too many completions, or `min_tokens` beyond the context.
        ContextLength: a prompt fills the context, or `max_tokens` does not fit behind it.
        PayloadTooLarge: the work or the result could not fit into a message.
    """
    sequences = len(prompt_lengths) * params.n
    running = len(prompt_lengths) * max(params.n, params.beam_width or 0)
    if running > MAX_SEQUENCES:
        raise InvalidRequest(
            f"the request asks for {running} completions or beams, at most {MAX_SEQUENCES} are allowed"
        )
    longest = max(prompt_lengths)
    room = limits.max_model_len - longest
    if room < 1:
        raise ContextLength(
            f"the prompt has {longest} tokens and the context {limits.max_model_len}, of which one must be left to "
            "generate: shorten the prompt"
        )
    default = min(room, limits.max_new_tokens or room)
    max_tokens = default if params.max_tokens is None else params.max_tokens
    if max_tokens > room:
        raise ContextLength(
            f"the prompt has {longest} tokens and max_tokens is {max_tokens}, the context has {limits.max_model_len}: "
            f"shorten the prompt or set max_tokens to at most {room}"
        )
    if params.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens {params.min_tokens} exceeds the {max_tokens} tokens that the context leaves")
    _check_payload(prompt_lengths, sequences, max_tokens, limits.max_payload)
    return max_tokens


def _check_payload(prompt_lengths: Sequence[int], sequences: int, max_tokens: int, max_payload: int) -> None:
    room = max_payload - HEADROOM
    work = 4 * sum(prompt_lengths)
    slot = SLOT_BYTES * (max(prompt_lengths) + max_tokens)
    if max(work, slot) > room:
        raise PayloadTooLarge(
            f"the request needs messages of {max(work, slot) + HEADROOM} bytes, the broker takes {max_payload}: "
            "send fewer or shorter prompts"
        )
    result = RESULT_BYTES * sequences * max_tokens
    if result > room:
        raise PayloadTooLarge(
            f"the result could need a message of {result + HEADROOM} bytes, the broker takes {max_payload}: "
            f"set max_tokens to at most {max(room // (RESULT_BYTES * sequences), 0)}, or ask for fewer completions"
        )
