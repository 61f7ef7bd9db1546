"""Executor to scheduler and detokenizers: the results of one step for the whole batch, as columns."""

from enum import IntEnum

from pagewire.shared.messages.codec import Wire

NO_TOKEN = 0xFFFF_FFFF
"""In `StepOutput.tokens`: the row sampled no token, because its prompt is not complete."""

RING_STEPS = 4096
"""Step outputs that an executor keeps for readers that have missed some."""


class Finish(IntEnum):
    """Why the device ended a sequence."""

    NONE = 0
    """The sequence has not ended."""
    STOP = 1
    """It sampled one of its `stop_ids`."""
    LENGTH = 2
    """It reached `max_tokens`."""


class StepOutput(Wire, frozen=True):
    """Results of one step. For a plan that is applied without a step, an output without rows is sent."""

    term: int
    """Term of the last applied plan."""
    step: int
    """Consecutive within the term, from 0."""
    plan: int
    """Number of the last plan applied before the step."""
    sequences: bytes
    """Packed sequence id of each row."""
    starts: bytes
    """Packed first position that each row wrote."""
    counts: bytes
    """Packed number of positions that each row wrote."""
    tokens: bytes
    """Packed token that each row sampled for position start + count, or `NO_TOKEN`."""
    finishes: bytes
    """One byte per row, a `Finish`."""
    elapsed_us: int
    """Time of the step on the device, in microseconds."""
    candidate_counts: bytes = b""
    """Packed pairs (sequence, number of candidates) of the rows whose sampling requests candidates."""
    candidates: bytes = b""
    """Packed ids of these rows' candidates, the most likely first, row after row."""
    logprobs: bytes = b""
    """Natural log-probabilities of the candidates before any filter, packed little-endian float32."""
    failed: bytes = b""
    """Packed ids of the sequences that were in a step that raised. Such an output has no rows and is the last one of
    its term: the slots are empty, and nothing runs until a higher term begins."""

    def __post_init__(self) -> None:
        """Checks that the columns fit together: the effects of a step are never left half done.

        Raises:
            ValueError: they do not.
        """
        rows = 4 * len(self.finishes)
        if not rows == len(self.sequences) == len(self.starts) == len(self.counts) == len(self.tokens):
            raise ValueError("the columns of a step have different lengths")
        if rows and max(self.finishes) >= len(Finish):
            raise ValueError("a row of a step has an unknown finish")
        if len(self.candidate_counts) % 8 or len(self.candidates) % 4 or len(self.failed) % 4:
            raise ValueError("a column of a step ends within a number")
        if len(self.candidates) != len(self.logprobs):
            raise ValueError("a step has candidates without log-probabilities")
