"""Executor to scheduler and detokenizers: the results of one step for the whole batch, as columns."""

from enum import IntEnum

from pagewire.shared.messages.codec import Wire, unpack

NO_TOKEN = 0xFFFF_FFFF
"""Entry of `StepOutput.tokens` for a row that sampled no token, because its prompt is not complete or its logits are
not finite; only where there are no `token_counts`."""
LOWEST_LOGPROB = -9999.0
"""Stand-in for minus infinity, which JSON does not have; vLLM's value."""
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
    NOT_FINITE = 3
    """No token could be sampled: its logits were NaN, or the largest was infinite. The request ends with an error."""
    GRAMMAR_LIMIT = 4
    """No token could be sampled: its grammar went beyond a limit. The request ends with an error."""
    ADAPTER_LOST = 5
    """It never ran, because its adapter could not be loaded. The request ends with an error."""


ERRORS = frozenset({Finish.NOT_FINITE, Finish.GRAMMAR_LIMIT, Finish.ADAPTER_LOST})
"""The ends without a token, each of which ends the request with an error."""
_FINISHES = bytes(Finish)


class StepOutput(Wire, frozen=True):
    """Results of one step. A plan that is applied without a step is answered by an output without rows."""

    term: int
    """Term of the last applied plan."""
    step: int
    """Number of the step, consecutive within the term, from 0."""
    plan: int
    """Number of the last plan applied before the step."""
    sequences: bytes
    """Packed sequence id of each row."""
    starts: bytes
    """Packed first position that each row wrote."""
    counts: bytes
    """Packed number of positions that each row wrote, without the tokens that the step itself has sampled."""
    tokens: bytes
    """Packed tokens that each row sampled for the positions from start + count on, row after row."""
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
    logprob_tokens: bytes = b""
    """Packed triples (sequence, position, number of entries), one per token whose log-probabilities are reported, in
    the order of the positions of each sequence. Tokens of prompts are reported in outputs without rows, which come
    before the output with the first sampled token."""
    logprob_ranks: bytes = b""
    """Packed rank of each token in `logprob_tokens`, from 1: the number of tokens that are at least as likely."""
    logprob_ids: bytes = b""
    """Packed ids of the entries: each token's own first, then the likeliest ones there, the most likely first."""
    logprob_values: bytes = b""
    """Log-probability, or logit as `--logprobs-mode` says, of each of `logprob_ids`, packed little-endian float32;
    `LOWEST_LOGPROB` for an impossible token."""
    failed: bytes = b""
    """Packed ids of the sequences that were in a step that raised. The output has no rows then and is the last one of
    its term: the slots are empty, and nothing runs until a higher term begins."""
    token_counts: bytes = b""
    """Packed number of `tokens` of each row, which may be 0; empty: `tokens` has one entry per row."""
    drafts: bytes = b""
    """Packed triples (sequence, drafted tokens that its row verified, those among them that were right), of the rows
    that had any. The KV of the right ones is written, too; `counts` are without them."""

    def __post_init__(self) -> None:
        """Raises ValueError if the columns do not fit together: a reader never applies half of a step."""
        rows = 4 * len(self.finishes)
        entries = 4 * sum(unpack(self.token_counts)) if self.token_counts else rows
        if not rows == len(self.sequences) == len(self.starts) == len(self.counts) or entries != len(self.tokens):
            raise ValueError("the columns of a step have different lengths")
        if self.token_counts and len(self.token_counts) != rows:
            raise ValueError("a step does not say how many tokens each row has")
        if self.finishes.translate(None, _FINISHES):
            raise ValueError("a row of a step has an unknown finish")
        if len(self.candidate_counts) % 8 or len(self.drafts) % 12 or len(self.candidates) % 4 or len(self.failed) % 4:
            raise ValueError("a column of a step ends within a number")
        if len(self.candidates) != len(self.logprobs):
            raise ValueError("a step has candidates without log-probabilities")

    @property
    def num_drafts(self) -> int:
        """Number of drafted tokens that the step has verified."""
        return sum(unpack(self.drafts)[1::3]) if self.drafts else 0

    def split_drafts(self) -> dict[int, tuple[int, int]]:
        """Returns the number of drafted tokens of each sequence that had any, and how many of them were right."""
        numbers = iter(unpack(self.drafts))
        return {sequence: (drafted, right) for sequence, drafted, right in zip(numbers, numbers, numbers, strict=True)}

    def split_tokens(self) -> tuple[list[int], dict[int, list[int]]]:
        """Returns the first token of each row, or `NO_TOKEN`, and by sequence the further tokens of rows with several.

        Where each row has one token, as in nearly all steps, nothing but `tokens` is unpacked.
        """
        tokens = unpack(self.tokens)
        if not self.token_counts:
            return tokens, {}
        first: list[int] = []
        more: dict[int, list[int]] = {}
        begin = 0
        for sequence, count in zip(unpack(self.sequences), unpack(self.token_counts), strict=True):
            first.append(tokens[begin] if count else NO_TOKEN)
            if count > 1:
                more[sequence] = tokens[begin + 1 : begin + count]
            begin += count
        return first, more
