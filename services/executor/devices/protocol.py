"""The interface between the step loop and a device. A device knows slots, blocks and tokens, not sequences or plans."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from pagewire.services.executor.adapters.adapter import Adapter
from pagewire.services.executor.adapters.targets import Targets
from pagewire.services.executor.devices.sequence_grammar import SequenceGrammar
from pagewire.shared.sampling_parameters import Record
from pagewire.shared.settings.config import STEP_TOKENS

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Capacity:
    """The sizes and limits of a device."""

    num_blocks: int
    """Size of the KV pool; block ids are in [0, num_blocks)."""
    block_size: int
    """KV positions per block."""
    max_num_seqs: int
    """Number of slots; slot numbers are in [0, max_num_seqs)."""
    max_model_len: int
    """Context length, in tokens."""
    vocab_size: int
    """Token ids are in [0, vocab_size)."""
    max_candidates: int = 0
    """Maximum candidates per row; 0: the device reports none."""
    step_tokens: int = STEP_TOKENS
    """Tokens of the first steps where no budget is set."""
    max_step_tokens: int = 0
    """Maximum tokens of a step where no budget is set; 0: the budget does not grow."""
    windows: tuple[int, ...] = (0,)
    """Per group of layers, how many positions a query sees, its own included; 0: all. An entry of a block table has one
    block of each group. Positions that a window has left behind are not read: their block may be another sequence's."""
    mixed_prompt_tokens: int = 0
    """Prompt tokens of a step that decodes sequences too, unless many prompts wait; 0: no such limit."""
    max_drafts: int = 0
    """Maximum drafted tokens that a row verifies; 0: the device verifies none."""
    max_step_drafts: int = 0
    """Maximum drafted tokens that a step verifies; 0: any number of `max_drafts` in each row."""
    max_drafted_step: int = 0
    """Maximum positions of a step with drafted tokens; 0: any number."""
    max_drafted_rows: int = 0
    """Number of rows that sample beyond which drafted tokens cannot pay."""
    max_row_tokens: int = 1
    """Maximum tokens that a row samples. Above 1, the number of each row is known only when the step has ended, and a
    slot is in no other step until then."""
    pool_bytes: int = 0
    """Bytes of the KV pool in this machine's memory, which takes them as it fills."""


class StepBatch(msgspec.Struct, frozen=True):
    """The input of one step: R rows with T tokens in total, as columns. A msgspec struct, which is fast to create."""

    slots: Int64
    """[R] slot of each row; no slot occurs twice."""
    num_computed_tokens: Int64
    """[R] first position of each row."""
    query_lens: Int64
    """[R] number of positions of each row, at least 1; their sum is T."""
    token_ids: Int64
    """[T] input ids, row after row. The value is ignored where a pending step samples the token."""
    samples: Bool
    """[R] whether the row samples the token behind its last known one, and maybe following ones."""
    next_ids: Int64 | None = None
    """[T] the prompt's token after each token where the log-probabilities of that are reported, -1 elsewhere; None:
    nowhere."""
    num_drafts: Int64 | None = None
    """[R] number of the last positions of each row that are drafted tokens, only in rows that sample: the row samples a
    token at the position of each of them, and one behind, as long as the tokens are the drafted ones. None: no row has
    any."""

    @property
    def ends(self) -> Int64:
        """[R] position after the last one of each row whose token is known, where the row samples."""
        ends: Int64 = self.num_computed_tokens + self.query_lens
        return ends if self.num_drafts is None else ends - self.num_drafts

    @property
    def positions(self) -> Int64:
        """[T] position of each token."""
        if len(self.token_ids) == len(self.slots):
            return self.num_computed_tokens
        return positions_of(self.num_computed_tokens, self.query_lens)


_NONE: Int64 = np.empty(0, np.int64)
NO_ROWS = StepBatch(_NONE, _NONE, _NONE, _NONE, np.empty(0, np.bool_))
"""A step without rows, such as one of padding only."""


def positions_of(num_computed_tokens: Int64, query_lens: Int64) -> Int64:
    """Returns the positions [T] of rows of `query_lens` [R] positions, at least 1, after the computed ones."""
    ends: Int64 = query_lens.cumsum()
    if ends[-1] == len(query_lens):
        return num_computed_tokens
    return np.arange(ends[-1]) + np.repeat(num_computed_tokens + query_lens - ends, query_lens)


def rows_and_places(counts: Int64) -> tuple[Int64, Int64]:
    """Returns the row of each entry of rows that have `counts` [R] entries, and the entry's place in its row.

    >>> [column.tolist() for column in rows_and_places(np.array([2, 0, 1]))]
    [[0, 0, 2], [0, 1, 0]]
    """
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - (counts.cumsum() - counts)[rows]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The most likely tokens of some rows of a step, by the edited logits, without filters and temperature."""

    rows: Int64
    """[M] row numbers in the batch."""
    counts: Int64
    """[M] number of candidates of each row; their sum is N."""
    ids: Int64
    """[N] token ids, row after row, the most likely first."""
    logprobs: Float32
    """[N] natural log-probabilities of the tokens, all finite."""


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes of a sequence's logits, beside its stop ids and its record. Ids are within the vocabulary."""

    bias_ids: Int64
    """[B] ids, each once."""
    biases: Float32
    """[B] is added to the logits of these ids."""
    allowed_ids: Int64
    """[A] the only ids that may be sampled; empty: all."""
    bad_words: Int64
    """[N] texts that may not be generated: of each the number of its ids, then the ids. The last id is banned where
    the output ends with the others."""
    penalized: bool
    """Whether the record has penalties."""
    num_prompt_tokens: int
    """Number of the sequence's tokens that belong to the prompt. The others are output."""
    tokens: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    """Tokens of the sequence so far."""
    grammar: SequenceGrammar | None = None
    """Allows some tokens only, beside no `allowed_ids`; ready when the sequence is in a step that samples."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The reported log-probabilities, or logits, of some tokens and of the likeliest tokens in their places."""

    rows: Int64
    """[M] row in the batch of each token."""
    positions: Int64
    """[M] position of each token in its sequence, ascending in each row."""
    counts: Int64
    """[M] number of entries of each token; their sum is N."""
    ids: Int64
    """[N] ids of the entries: of each token first its own, then the likeliest ones, the most likely first."""
    values: Float32
    """[N] log-probability or logit of each id; at least `LOWEST_LOGPROB`."""
    ranks: Int64
    """[M] number of tokens that are at least as likely as the token itself, from 1."""


class LoadedAdapter(Protocol):
    """An adapter in the form in which a device computes with it."""

    @property
    def packed(self) -> Any:
        """Result of `AdapterSlots.pack`; only when its sequence is in a step."""


class AdapterSlots(Protocol):
    """The adapters of a device's slots. Its methods but `pack` are called on the thread of the device."""

    targets: Targets
    """The modules of the model."""

    def pack(self, adapter: Adapter) -> Any:
        """Returns an adapter in the form in which the device computes with it. May be called on any thread."""

    def assign(self, slot: int, adapter: LoadedAdapter) -> None:
        """Gives the sequence in a slot an adapter, before its first step."""

    def clear(self, slot: int) -> None:
        """Removes the adapter of a slot whose sequence is removed."""


class PendingStep(Protocol):
    """A launched step."""

    @property
    def token_counts(self) -> Int64 | None:
        """[R] number of tokens of each row, at most `Capacity.max_row_tokens`; None if that is 1: each row then has one
        entry. A row that does not sample has 0, and a row that samples may have 0 too: its last position is then
        computed again by the next step. In a step with drafts, the tokens of a row are those that it has sampled, and
        those that a grammar forces behind them; none has 0 that samples. Only after `wait`."""

    @property
    def forced(self) -> Mapping[int, Sequence[int]]:
        """The tokens, by row, that a grammar forces behind the one that the row samples, known from the launch on. The
        next rows of that slot compute them."""

    @property
    def logprobs(self) -> Logprobs | None:
        """Log-probabilities of the tokens that were sampled in slots that report them, but for rows whose logits are
        not finite; None if there are none. Only after `wait`."""

    @property
    def prompt_logprobs(self) -> Logprobs | None:
        """Log-probabilities of the tokens `StepBatch.next_ids`, always of the model's own distribution; None if there
        are none. Only after `wait`."""

    @property
    def candidates(self) -> Candidates | None:
        """Candidates of the rows that sampled in slots that request them; None if there are none. Only after `wait`."""

    def wait(self) -> Int64:
        """Waits until the step has ended and returns the tokens of all rows, row after row.

        Without `token_counts` these are [R], with -1 where the row sampled none.

        A row whose logits are not finite has `sampling_parameters.NOT_FINITE` in place of its last token. Called
        once per step, in order of launch. If an earlier step has ended a row's sequence, the row's token is arbitrary.
        """


class Device(Protocol):
    """Computes steps, one after the other. All methods are called on one thread."""

    capacity: Capacity
    depth: int
    """Maximum number of pending steps. Above 1, the device computes while the host prepares the next step."""

    adapters: AdapterSlots | None = None
    """The adapters of the slots; None: the device was opened without."""
    draft_model: "Device | None" = None
    """A smaller model with a pool and slots of its own, which has as many slots and drafts for them; None: there is
    none. `close` closes it, too."""
    recovers: bool
    """Whether steps can be right after one has raised. Otherwise the process ends, and a new one opens a device."""

    @property
    def busy(self) -> float:
        """Seconds in which the device has computed since it was opened, by the device's clock."""

    @property
    def lost(self) -> str:
        """Why the device can compute no more; its methods then raise `DeviceLost`. Empty: it can. Any thread may read
        it."""
        return ""

    @property
    def progress(self) -> float:
        """A number that grows while a step computes, as with each layer; 0: the device does not say. Any thread may
        read it."""
        return 0.0

    def add(
        self,
        slot: int,
        blocks: Sequence[int],
        sampling: Record,
        stop_ids: Sequence[int] = (),
        edits: Edits | None = None,
    ) -> None:
        """Puts a sequence into a free slot. Entry i of `blocks` holds positions [i * block_size, (i + 1) * block_size):
        a block of each group of layers.

        `sampling` [] are the sampling parameters. `stop_ids` end the sequence and are not sampled below the record's
        `min_length`. `edits` is None for a sequence without any, and given if the record has penalties.
        """

    def extend(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Appends an entry to the block table of `slots[i]`, for each i in order. `blocks` has all entries in a row."""

    def remove(self, slot: int) -> None:
        """Frees a slot. The content of its blocks stays."""

    def rewind(self, slot: int, length: int) -> None:
        """Forgets the tokens of a slot but the first `length`, which it has computed: the next step gives others.

        Only where no step is pending. By default nothing is kept that the next step would not overwrite.
        """
        return

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies the KV of block `sources[i]` into block `targets[i]`, for each i; no target is a source.

        The copy takes effect after the pending steps and before all later ones.
        """

    def launch(self, batch: StepBatch) -> PendingStep:
        """Launches a step after the pending ones: it writes the KV of the batch's positions and samples tokens.

        A position must lie within the slot's blocks, and the KV of every earlier position must be written, or be
        written by a pending step. Later changes of slots have no effect on the step.
        """

    def on_lost(self, wake: Callable[[], None]) -> None:
        """Has `wake` called, on any thread, when the device becomes lost; at once if it is."""
        if self.lost:
            wake()

    def close(self) -> None:
        """Frees the memory. No method may be called afterwards."""
