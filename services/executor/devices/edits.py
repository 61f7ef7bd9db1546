"""What changes the logits of single sequences: biases, allowed tokens, bad words, and penalties for earlier tokens.

The order of operations is vLLM's: allowed tokens, biases, stop ids below the minimum length, the penalties for
repetition, for frequency and for presence, bad words; then temperature and the filters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire.services.executor.devices.protocol import Capacity, Edits, Int64
from pagewire.shared.sampling_parameters import Record

Int32 = npt.NDArray[np.int32]
UInt32 = npt.NDArray[np.uint32]


def seen_of(edits: Edits) -> tuple[Int64, Int64]:
    """Returns the distinct tokens of a sequence, and twice the occurrences of each in the output, plus one if the
    prompt has it."""
    prompt, output = edits.tokens[: edits.num_prompt_tokens], edits.tokens[edits.num_prompt_tokens :]
    ids, places = np.unique(np.concatenate((prompt, output)), return_inverse=True)
    counts = 2 * np.bincount(places[len(prompt) :], minlength=len(ids))
    counts[places[: len(prompt)]] |= 1
    return ids, counts


def bits_of(ids: Int64, vocab_size: int) -> UInt32:
    """Returns a bit per token, [ceil(vocabulary / 32)]: token t is bit t % 32 of word t // 32."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[ids] = True
    return np.packbits(bits, bitorder="little").view("<u4")


def words_of(bad_words: Int64) -> list[Int64]:
    """Returns the ids of each of the `Edits.bad_words`.

    Raises:
        ValueError: the last one is cut off, or one is empty.
    """
    words, begin = [], 0
    while begin < len(bad_words):
        end = begin + 1 + int(bad_words[begin])
        if end > len(bad_words) or end == begin + 1:
            raise ValueError("a bad word is empty or cut off")
        words.append(bad_words[begin + 1 : end])
        begin = end
    return words


@dataclass(slots=True)
class SlotEdits:
    """The edits of a slot on a CPU, and what they need of the sequence's tokens."""

    how: Edits
    allowed: UInt32 | None
    """See `bits_of`; None: all tokens are allowed."""
    seen: Int32 | None
    """[vocabulary] see `seen_of`; None: there are no penalties."""
    history: Int64 | None
    """[max_model_len + 1] the sequence's tokens; None: there are no bad words."""

    def banned(self, position: int) -> list[int]:
        """Returns the ids at `position` that would complete a bad word: those behind all its other ids."""
        if self.history is None:
            return []
        output = self.history[self.how.num_prompt_tokens : position]
        return [
            int(word[-1])
            for word in words_of(self.how.bad_words)
            if len(word) - 1 <= len(output) and (output[len(output) - len(word) + 1 :] == word[:-1]).all()
        ]

    def append(self, position: int, token: int) -> None:
        """Adds a generated token."""
        if self.how.grammar is not None:
            self.how.grammar.sampled(token)
        if self.seen is not None:
            self.seen[token] += 2
        if self.history is not None:
            self.history[position] = token


def slot_edits(edits: Edits, capacity: Capacity, mask: UInt32 | None = None) -> SlotEdits:
    """Returns the edits of a sequence with its tokens so far.

    If the sequence has a grammar, `mask` [ceil(vocabulary / 32)] will hold what it allows.
    """
    seen = history = None
    if edits.penalized:
        seen = np.zeros(capacity.vocab_size, np.int32)
        ids, counts = seen_of(edits)
        seen[ids] = counts
    if len(edits.bad_words):
        history = np.zeros(capacity.max_model_len + 1, np.int64)
        history[: len(edits.tokens)] = edits.tokens
    allowed = bits_of(edits.allowed_ids, capacity.vocab_size) if len(edits.allowed_ids) else None
    if edits.grammar is not None:
        allowed = mask
    return SlotEdits(replace(edits, tokens=edits.tokens[:0]), allowed, seen, history)


def edit(
    logits: Tensor,
    records: Record,
    positions: Int64,
    edits: Sequence[SlotEdits | None],
    banned: Sequence[tuple[int, Sequence[int]]] = (),
) -> None:
    """Edits logits in place, in the order that this module gives.

    Args:
        logits: float32 [R, V].
        records: [R] sampling parameters of each row.
        positions: [R] position of the token to sample in its sequence.
        edits: [R] edits of each row, or None.
        banned: pairs of a row and the stop ids that it must not sample.
    """
    for row, how in enumerate(edits):
        if how is not None and how.allowed is not None:
            logits[row, _forbidden(how.allowed, logits.shape[1]).to(logits.device)] = -torch.inf
        if how is not None and len(how.how.bias_ids):
            ids = torch.from_numpy(how.how.bias_ids).to(logits.device)
            logits[row, ids] += torch.from_numpy(how.how.biases).to(logits.device)
    for row, stops in banned:
        logits[row, list(stops)] = -torch.inf
    for row, how in enumerate(edits):
        if how is not None and how.seen is not None:
            _penalize(logits[row], records[row], torch.from_numpy(how.seen).to(logits.device))
        if how is not None and (words := how.banned(int(positions[row]))):
            logits[row, words] = -torch.inf


def _forbidden(allowed: UInt32, vocabulary: int) -> Tensor:
    return torch.from_numpy(np.unpackbits(allowed.view(np.uint8), bitorder="little")[:vocabulary] == 0)


def _penalize(logits: Tensor, record: Record, seen: Tensor) -> None:
    """Applies the penalties of a record [] to logits [V] in place; see `seen_of` for `seen` [V]."""
    factor = float(record["repetition_penalty"])
    logits.copy_(torch.where(seen > 0, torch.where(logits > 0, logits / factor, logits * factor), logits))
    logits -= float(record["frequency_penalty"]) * (seen // 2)
    logits -= float(record["presence_penalty"]) * (seen > 1)
