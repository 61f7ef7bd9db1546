"""Executor to scheduler and detokenizers: one columnar message per step for the whole batch."""

from enum import IntEnum

from pagewire.shared.messages.codec import Wire

NO_TOKEN = 0xFFFF_FFFF
"""In `StepOutput.tokens`: the row sampled nothing, its prompt is unfinished."""

RING_STEPS = 4096
"""Step outputs that an executor keeps for readers that missed some."""


class Finish(IntEnum):
    """Why the device ended a sequence."""

    NONE = 0
    """It goes on."""
    STOP = 1
    """It picked one of its `stop_ids`."""
    LENGTH = 2
    """It reached `max_tokens`."""


class StepOutput(Wire, frozen=True):
    """What one step did. A plan that was applied without a step is answered by one without rows."""

    term: int
    """Of the last plan applied."""
    step: int
    """Dense within the term, from 0."""
    plan: int
    """Number of the last plan applied before the step."""
    sequences: bytes
    """Packed sequence id of each row that was run."""
    starts: bytes
    """Packed first position that each row wrote."""
    counts: bytes
    """Packed number of positions that each row wrote."""
    tokens: bytes
    """Packed token sampled at position start + count, or `NO_TOKEN`."""
    finishes: bytes
    """One byte per row, a `Finish`."""
    elapsed_us: int
    """Time that the device took, in microseconds."""
    candidate_counts: bytes = b""
    """Packed pairs (sequence, number of candidates) of the rows whose sampling asks for candidates."""
    candidates: bytes = b""
    """Packed ids of their likeliest tokens, likeliest first, row after row."""
    logprobs: bytes = b""
    """Natural log-probabilities of these tokens before any filter, packed little-endian float32."""
