"""Drafts tokens by sampling from a smaller model, one after the other."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from pagewire.services.executor.devices.defaults import DRAFT_MODEL_TOKENS
from pagewire.services.executor.devices.protocol import Device, Float64, Int64, StepBatch
from pagewire.services.executor.speculation.drafter import NO_DRAFT, Draft, Drafter, DraftRow, NewSequence
from pagewire.services.executor.speculation.step_cost import StepCost
from pagewire.shared.sampling_parameters import PARAMETERS, Record, record

MATCH_LENGTH = 32
"""`Draft.match_length` of every draft: all its tokens are of one class, whose rate is learnt."""
FILTERS = (*(parameter.name for parameter in PARAMETERS if not parameter.penalty), "key")
"""Columns of a sequence's record with which its drafts are sampled. With the random numbers of the sequence itself,
both models sample the same token where both give it a high probability."""


@dataclass(slots=True)
class _Sequence:
    """State of a sequence in the draft model."""

    sampling: Record
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Positions whose keys and values are there."""
    drafted: list[int] = field(default_factory=list)
    """Drafted tokens whose positions are computed: the last ones of `computed`."""

    def rewind(self, text: Int64) -> None:
        """Discards computed positions from the first drafted token on that differs from `text` [N]."""
        begin = self.computed - len(self.drafted)
        right = 0
        for token, drafted in zip(text[begin:].tolist(), self.drafted, strict=False):
            if token != drafted:
                break
            right += 1
        self.computed = min(begin + right, len(text) - 1)
        self.drafted = []


class _Chunk(NamedTuple):
    """Positions of a sequence that the next step of the model computes."""

    row: int
    """Index of the sequence's row."""
    slot: int
    tokens: list[int]
    samples: bool


class DraftModel(Drafter):
    """Drafts by a model with slots and a KV pool of its own.

    A sequence takes a slot and blocks when it is drafted for, and keeps them until it ends. Where no block is left, and
    beyond the model's context, nothing is drafted. A text that the model has not seen, such as a prompt, or all of a
    sequence that comes back after a preemption, is computed first, `DRAFT_MODEL_TOKENS` at a time.
    """

    def __init__(self, device: Device, vocab_size: int) -> None:
        """`device` computes the model; ids from `vocab_size` on are not in the vocabulary of the other one."""
        self.max_length = device.capacity.max_model_len + 1
        self._device = device
        self._vocab_size = vocab_size
        self._cost = StepCost()
        self._sequences: dict[int, _Sequence] = {}
        groups = len(device.capacity.windows)
        self._groups = groups
        self._free = list(range(device.capacity.num_blocks // groups))  # entries of block tables

    @override
    def begin(self, slot: int, sequence: NewSequence) -> None:
        self._sequences[slot] = _Sequence(record(**{name: sequence.sampling[name].item() for name in FILTERS}))

    @override
    def end(self, slot: int, text: Int64) -> None:
        blocks = self._sequences.pop(slot).blocks
        if blocks:
            self._device.remove(slot)
        self._free += blocks

    @override
    def seconds(self, rows: int, max_tokens: int) -> Float64:
        step = self._cost.seconds(rows, 0)[0] if self._cost.observed else 0.0
        return np.arange(max_tokens + 1.0) * step

    @override
    def draft(self, rows: Sequence[DraftRow]) -> list[Draft]:
        tokens: list[list[int]] = [[] for _ in rows]
        chunks = self._unseen(rows)
        while chunks:
            sampled = self._compute(chunks)
            following = []
            for chunk, token in zip(chunks, sampled, strict=True):
                if not chunk.samples or not 0 <= token < self._vocab_size:
                    continue
                tokens[chunk.row].append(token)
                if len(tokens[chunk.row]) < rows[chunk.row].room:
                    sequence = self._sequences[chunk.slot]
                    sequence.drafted.append(token)
                    following.append(_Chunk(chunk.row, chunk.slot, [token], samples=True))
            chunks = following
        return [Draft(each, [1.0] * len(each), MATCH_LENGTH) if each else NO_DRAFT for each in tokens]

    def _unseen(self, rows: Sequence[DraftRow]) -> list[_Chunk]:
        """Returns the positions of each row's text that are not computed yet, the fewest first, as many as one call
        computes."""
        chunks = []
        for index, row in enumerate(rows):
            sequence, capacity = self._sequences[row.slot], self._device.capacity
            sequence.rewind(row.text)
            text, end = row.text[sequence.computed :], len(row.text) + row.room - 1
            if row.room < 1 or end > capacity.max_model_len or int(text.max()) >= capacity.vocab_size:
                continue
            if self._reserve(row.slot, end):
                self._device.rewind(row.slot, sequence.computed)
                chunks.append(_Chunk(index, row.slot, text.tolist(), samples=True))
        left, cut = DRAFT_MODEL_TOKENS, []
        for chunk in sorted(chunks, key=lambda chunk: len(chunk.tokens)):
            tokens = chunk.tokens[:left]
            left -= len(tokens)
            if tokens:
                cut.append(chunk._replace(tokens=tokens, samples=len(tokens) == len(chunk.tokens)))
        return cut

    def _reserve(self, slot: int, positions: int) -> bool:
        """Gives a sequence blocks for so many positions; returns whether there are enough."""
        blocks = self._sequences[slot].blocks
        missing = -(-positions // self._device.capacity.block_size) - len(blocks)
        if missing > len(self._free):
            return False
        if not blocks:
            self._device.add(slot, [], self._sequences[slot].sampling)
        for _ in range(missing):
            entry = self._free.pop()
            blocks.append(entry)
            first = entry * self._groups
            self._device.extend([slot], range(first, first + self._groups))
        return True

    def _compute(self, chunks: Sequence[_Chunk]) -> list[int]:
        """Computes the positions of the chunks; returns the token that each of them samples, if it does."""
        sequences = [self._sequences[chunk.slot] for chunk in chunks]
        batch = StepBatch(
            np.array([chunk.slot for chunk in chunks]),
            np.array([sequence.computed for sequence in sequences]),
            np.array([len(chunk.tokens) for chunk in chunks]),
            np.concatenate([chunk.tokens for chunk in chunks]),
            np.array([chunk.samples for chunk in chunks]),
        )
        began = time.perf_counter()
        sampled: list[int] = self._device.launch(batch).wait().tolist()
        self._cost.observe(len(batch.token_ids), time.perf_counter() - began)
        for chunk, sequence in zip(chunks, sequences, strict=True):
            sequence.computed += len(chunk.tokens)
        return sampled
