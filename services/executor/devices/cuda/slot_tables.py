"""The state of slots on the device: many tables in one tensor, so that one kernel launch can update all of them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagewire.kernels.triton.sampling.sampling_columns import (
    ALLOWED,
    BAD_WORDS,
    BIASED,
    CHECKED_STOP_IDS,
    COLUMNS,
    GRAMMAR,
    MAX_BAD_WORD_IDS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_STOP_IDS,
    PENALIZED,
    SamplingColumns,
)
from pagewire.kernels.triton.step.sequence_state import SequenceState
from pagewire.services.executor.devices.cuda.staging import Int32
from pagewire.services.executor.devices.edits import bits_of, seen_of, words_of
from pagewire.services.executor.devices.protocol import Capacity, Edits, Int64
from pagewire.shared.sampling_parameters import Record

_HOST_TYPES = {torch.float32: np.float32, torch.int32: np.int32, torch.int64: np.uint64}
_ALIGNED = 4
"""Alignment of tables, in entries: kernels load 16 bytes at once from the start of a table."""


class GpuSlots:
    """Tables with one row per slot. A place is an index into `memory`; values are int32 or the bits of a float32.

    Attributes:
        memory: int32 [N], all tables.
        state: views of `memory` with the state of the sequences, and the block table of the first group of layers.
        block_tables: int32 [slots, entries] views of `memory`, one per group of layers.
        sampling: views of `memory` with the sampling parameters.
        checked_stop_ids: int32 [slots, CHECKED_STOP_IDS], the first of each slot's stop ids.
    """

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        slots, context = capacity.max_num_seqs, capacity.max_model_len + 1
        entries, groups = -(-capacity.max_model_len // capacity.block_size), len(capacity.windows)
        self._group_columns: Int64 = np.arange(groups) * entries  # where the table of each group begins in a row
        self._widths = {
            **{name: dtype.itemsize // 4 for name, dtype in COLUMNS.items()},
            "tokens": context,
            "block_tables": groups * entries,
            "stop_ids": MAX_STOP_IDS,
            "checked_stop_ids": CHECKED_STOP_IDS,
            "bias_ids": MAX_BIASES,
            "bias": MAX_BIASES,
            "allowed": -(-capacity.vocab_size // 32),
            "seen": capacity.vocab_size,
            "bad_words": MAX_BAD_WORD_IDS,
            "bad_word_ends": MAX_BAD_WORDS,
        }
        self._widths |= dict.fromkeys(("known", "computed", "limit", "last", "alive", "edits", "num_prompt_tokens"), 1)
        self._offsets: dict[str, int] = {}
        size = 0
        for name, width in self._widths.items():
            self._offsets[name] = size
            size += -(-slots * width // _ALIGNED) * _ALIGNED
        self.memory = torch.zeros(size, dtype=torch.int32, device=device)

        def table(name: str) -> Tensor:
            first, width = self._offsets[name], self._widths[name]
            return self.memory[first : first + slots * width].view(slots, width)

        def column(name: str, dtype: torch.dtype = torch.int32) -> Tensor:
            return table(name).view(dtype).squeeze(1)

        self.block_tables = list(torch.split(table("block_tables"), entries, dim=1))
        self.state = SequenceState(
            tokens=table("tokens"),
            known=column("known"),
            computed=column("computed"),
            limit=column("limit").fill_(capacity.max_model_len),  # the host never asks for a position beyond the limit
            last=column("last").fill_(context),  # nor for one beyond a length that it knows
            alive=column("alive"),
            block_tables=self.block_tables[0],
        )
        self.sampling = SamplingColumns(
            columns={name: column(name, dtype) for name, dtype in COLUMNS.items()},
            stop_ids=table("stop_ids").fill_(-1),
            bias_ids=table("bias_ids").fill_(-1),
            bias=table("bias").view(torch.float32),
            edits=column("edits"),
            allowed=table("allowed"),
            seen=table("seen"),
            bad_words=table("bad_words"),
            bad_word_ends=table("bad_word_ends"),
            num_prompt_tokens=column("num_prompt_tokens"),
        )
        self.checked_stop_ids = table("checked_stop_ids").fill_(-1)
        self._stop_ids = [0] * slots  # number of each slot's stop ids
        self._vocab_size = capacity.vocab_size

    def places(self, name: str, slots: Int64, columns: Int64 | int = 0) -> Int64:
        """Returns the places of the entries [slots[i], columns[i]] of a table."""
        places: Int64 = self._offsets[name] + slots * self._widths[name] + columns
        return places

    def entries(self, slots: Int64, entries: Int64, blocks: Sequence[int]) -> tuple[Int64, Int32]:
        """Returns the places and values that write the `blocks` of `entries` [N] of the block tables of `slots` [N]."""
        columns = entries[:, None] + self._group_columns
        owners = np.repeat(slots, columns.shape[1])
        return self.places("block_tables", owners, columns.ravel()), np.array(blocks, np.int32)

    def row(self, name: str, slot: int, values: Int32) -> tuple[Int64, Int32]:
        """Returns the places and values that write `values` to the start of a slot's row."""
        return self.places(name, np.full(len(values), slot), np.arange(len(values))), values

    def outside(self, name: str, slot: int, change: tuple[Int64, Int32]) -> tuple[Int64, Int32]:
        """Returns a change, of places and values, without what it writes to a slot's row of a table."""
        places, values = change
        begin = self._offsets[name] + slot * self._widths[name]
        kept = (places < begin) | (places >= begin + self._widths[name])
        return places[kept], values[kept]

    def added(
        self, slot: int, blocks: Sequence[int], sampling: Record, stop_ids: Sequence[int], edits: Edits | None
    ) -> list[tuple[Int64, Int32]]:
        """Returns the places and values that add a sequence, which stays dead until it gets its first tokens.

        Rows that are too wide to be sent are enqueued to be emptied first.
        """
        ids = np.full(max(len(stop_ids), self._stop_ids[slot], CHECKED_STOP_IDS), -1, np.int32)
        ids[: len(stop_ids)] = stop_ids
        self._stop_ids[slot] = len(stop_ids)
        count = len(blocks) // len(self.block_tables)
        return [
            self.entries(np.full(count, slot), np.arange(count), blocks),
            self.row("stop_ids", slot, ids),
            self.row("checked_stop_ids", slot, ids[:CHECKED_STOP_IDS]),
            self.row("alive", slot, np.zeros(1, np.int32)),
            *(self.row(name, slot, _bits(sampling[name], dtype)) for name, dtype in COLUMNS.items()),
            *self._edits(slot, edits),
        ]

    def _edits(self, slot: int, edits: Edits | None) -> list[tuple[Int64, Int32]]:
        """Returns the places and values of a sequence's edits. Tables of kinds that it has not stay as they are."""
        if edits is None:
            return [self.row("edits", slot, np.zeros(1, np.int32))]
        kinds, changes = 0, [self.row("num_prompt_tokens", slot, np.array([edits.num_prompt_tokens], np.int32))]
        if edits.grammar is not None:
            kinds |= GRAMMAR  # the mask comes with each step
        elif len(edits.allowed_ids):
            kinds |= ALLOWED
            changes.append(self.row("allowed", slot, bits_of(edits.allowed_ids, self._vocab_size).view(np.int32)))
        if len(edits.bias_ids):
            kinds |= BIASED
            changes.append(self.row("bias_ids", slot, _padded(edits.bias_ids, MAX_BIASES, -1)))
            changes.append(self.row("bias", slot, edits.biases.view(np.int32)))
        if edits.penalized:
            kinds |= PENALIZED
            self.sampling.seen[slot].zero_()
            ids, counts = seen_of(edits)
            changes.append((self.places("seen", np.full(len(ids), slot), ids), counts.astype(np.int32)))
        if len(edits.bad_words):
            kinds |= BAD_WORDS
            words = words_of(edits.bad_words)
            ends = np.cumsum([len(word) for word in words])
            changes.append(self.row("bad_words", slot, np.concatenate(words).astype(np.int32)))
            changes.append(self.row("bad_word_ends", slot, _padded(ends, MAX_BAD_WORDS, 0)))
        return [*changes, self.row("edits", slot, np.array([kinds], np.int32))]


def _padded(values: Int64, count: int, filling: int) -> Int32:
    return np.pad(values, (0, count - len(values)), constant_values=filling).astype(np.int32)


def _bits(value: Record, dtype: torch.dtype) -> Int32:
    """Returns a number [] of a record as the int32 entries of a column of `dtype`."""
    return np.array([value]).astype(_HOST_TYPES[dtype]).view(np.int32)
