"""What the step loop asks of a device. A device knows slots, blocks and tokens; sequences and plans it does not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from pagewire.shared.sampling import Record

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a device holds."""

    num_blocks: int
    """Size of the KV pool; block ids are in [0, num_blocks)."""
    block_size: int
    """KV positions per block."""
    max_num_seqs: int
    """Slots; slot numbers are in [0, max_num_seqs)."""
    max_model_len: int
    """Context, in tokens."""
    vocab_size: int
    """Token ids are in [0, vocab_size)."""
    max_candidates: int = 0
    """Candidates that a row can report; 0: none."""
    max_step_tokens: int = 0
    """Tokens up to which a step may grow where no budget is set; 0: it does not."""


class StepBatch(msgspec.Struct, frozen=True):
    """What one step computes: R rows of T tokens in all, as columns. A struct, since every step makes one."""

    slots: Int64
    """[R] slot of each row; no slot twice."""
    num_computed_tokens: Int64
    """[R] first position of each row."""
    query_lens: Int64
    """[R] number of positions of each row, at least 1; their sum is T."""
    token_ids: Int64
    """[T] input ids, rows one after the other. Anything where a step that is still pending samples the token."""
    samples: Bool
    """[R] whether the row samples the token at position start + width."""

    @property
    def ends(self) -> Int64:
        """[R] the position behind the last of each row."""
        ends: Int64 = self.num_computed_tokens + self.query_lens
        return ends

    @property
    def positions(self) -> Int64:
        """[T] of the tokens."""
        if len(self.token_ids) == len(self.slots):
            return self.num_computed_tokens
        return positions_of(self.num_computed_tokens, self.query_lens)


def positions_of(num_computed_tokens: Int64, query_lens: Int64) -> Int64:
    """[T] the positions that rows compute, row after row: `query_lens` [R], at least 1, behind the computed ones."""
    behind: Int64 = query_lens.cumsum()
    if behind[-1] == len(query_lens):
        return num_computed_tokens
    return np.arange(behind[-1]) + np.repeat(num_computed_tokens + query_lens - behind, query_lens)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest tokens of some rows of a step, by the model alone: no filter and no temperature."""

    rows: Int64
    """[M] which rows of the batch."""
    counts: Int64
    """[M] candidates of each; their sum is N."""
    ids: Int64
    """[N] tokens, row after row, the likeliest first."""
    logprobs: Float32
    """[N] their natural log-probabilities, finite."""


class Pending(Protocol):
    """A step that was launched."""

    @property
    def candidates(self) -> Candidates | None:
        """Once it was waited for: of the rows that sampled in slots that ask for candidates; None if there are none."""

    def wait(self) -> Int64:
        """Sleeps until the step has ended: [R] the token of each row, or -1 where it sampled none.

        Steps are waited for once and in order. A row that was launched behind the end of its sequence, by a stop id in
        a step before, may yield anything.
        """


class Device(Protocol):
    """Computes steps, one after the other. Every method runs on one thread, in order."""

    capacity: Capacity
    depth: int
    """Steps that may be launched before the oldest is waited for; above 1, it computes while the host works."""

    recovers: bool
    """Whether steps can be right after one has raised. Otherwise the process ends, and a new one opens a device."""

    @property
    def busy(self) -> float:
        """Seconds in which it computed, since it was opened, by its own clock."""

    def add(self, slot: int, blocks: Sequence[int], sampling: Record, stop_ids: Sequence[int] = ()) -> None:
        """A sequence takes a free slot. Entry i of `blocks` holds positions [i * block_size, (i + 1) * block_size).

        `sampling` [] says how its tokens are picked; `stop_ids` end it, and are not picked below its `min_length`.
        """

    def extend(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Appends `blocks[i]` to the block table of `slots[i]`, for each i in order."""

    def remove(self, slot: int) -> None:
        """The slot is free again. Its blocks keep their content."""

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies the KV of block `sources[i]` into block `targets[i]`, for each i; no target is a source.

        Steps that are pending read and write as if it happened behind them, later ones as if before.
        """

    def launch(self, batch: StepBatch) -> Pending:
        """Begins a step behind those that are pending: it writes the KV of the batch's positions and samples.

        A position must lie within the slot's blocks, and the KV of every position before it must be there or be written
        by a pending step. Whatever is added or removed later has no effect on the step.
        """

    def close(self) -> None:
        """Gives the memory back. Nothing may be called afterwards."""
