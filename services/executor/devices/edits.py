"""Edits of the logits of single sequences: biases, allowed tokens, bad words, and penalties for earlier tokens.

The order of operations is vLLM's: allowed tokens, biases, stop ids below the minimum length, the penalties for
repetition, for frequency and for presence, bad words; then temperature and the filters.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pagewire.services.executor.devices.protocol import Capacity, Edits, Int64

Int32 = npt.NDArray[np.int32]
UInt32 = npt.NDArray[np.uint32]


def seen_of(edits: Edits) -> tuple[Int64, Int64]:
    """Returns the distinct tokens of a sequence and a count of each: twice its occurrences in the output, plus one if
    the prompt has it."""
    prompt, output = edits.tokens[: edits.num_prompt_tokens], edits.tokens[edits.num_prompt_tokens :]
    ids, places = np.unique(np.concatenate((prompt, output)), return_inverse=True)
    counts = 2 * np.bincount(places[len(prompt) :], minlength=len(ids))
    counts[places[: len(prompt)]] |= 1
    return ids, counts


def bits_of(ids: Int64, vocab_size: int) -> UInt32:
    """Returns a bit per token, [ceil(vocabulary / 32)]: token t is bit t % 32 of word t // 32.

    >>> bits_of(np.array([0, 2, 33]), vocab_size=40).tolist()
    [5, 2]
    """
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[ids] = True
    return np.packbits(bits, bitorder="little").view("<u4")


def words_of(bad_words: Int64) -> list[Int64]:
    """Returns the ids of each of the `Edits.bad_words`.

    >>> [word.tolist() for word in words_of(np.array([2, 70, 71, 1, 9]))]
    [[70, 71], [9]]

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
    """The edits of a slot on a CPU, with the counts and the history of tokens that they depend on."""

    edits: Edits
    """The edits themselves, without the tokens so far."""
    allowed: UInt32 | None
    """[ceil(vocabulary / 32)] bits of the tokens that may be sampled, as `bits_of` has them; None: all tokens."""
    seen: Int32 | None
    """[vocabulary] counts of each token, as `seen_of` has them; None: there are no penalties."""
    history: Int64 | None
    """[max_model_len + 1] the sequence's tokens; None: there are no bad words."""

    def append(self, position: int, token: int) -> None:
        """Adds a generated token."""
        if self.edits.grammar is not None:
            self.edits.grammar.sampled(token)
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
