"""A step that was launched and has no output yet."""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pagewire.services.executor.devices.protocol import Bool, Candidates, Int64, Logprobs, StepBatch, rows_and_places
from pagewire.services.executor.steps.packed_columns import column, packed
from pagewire.shared.messages import pack, unpack
from pagewire.shared.messages.step import NO_TOKEN, Finish
from pagewire.shared.sampling_parameters import NOT_FINITE

UInt8 = npt.NDArray[np.uint8]

MAX_ENTRIES = 1 << 15
"""Entries of log-probabilities in one message, about: 8 bytes each."""

NOTHING: Mapping[int, Sequence[int]] = MappingProxyType({})

_LENGTH = np.uint8(Finish.LENGTH)


class OutputColumns(NamedTuple):
    """The rows of one step, packed as in `StepOutput`."""

    sequences: bytes = b""
    starts: bytes = b""
    counts: bytes = b""
    tokens: bytes = b""
    finishes: bytes = b""
    token_counts: bytes = b""
    drafts: bytes = b""

    @classmethod
    def of_lost_adapters(cls, starts: Mapping[int, int]) -> "OutputColumns":
        """Returns rows that end sequences with `Finish.ADAPTER_LOST`, by the first position that each would write."""
        rows = len(starts)
        finishes = bytes([Finish.ADAPTER_LOST]) * rows
        return cls(pack(starts), pack(starts.values()), pack([0] * rows), pack([NO_TOKEN] * rows), finishes)

    def blame_grammars(self, sequences: Collection[int]) -> "OutputColumns":
        """Returns the rows with `Finish.GRAMMAR_LIMIT` where one of the `sequences` could sample no token."""
        finishes = [
            Finish.GRAMMAR_LIMIT if finish == Finish.NOT_FINITE and sequence in sequences else finish
            for sequence, finish in zip(unpack(self.sequences), self.finishes, strict=True)
        ]
        return self._replace(finishes=bytes(finishes))


class CandidateColumns(NamedTuple):
    """The candidates of one step, packed as in `StepOutput`."""

    counts: bytes = b""
    """Pairs of a sequence id and the number of candidates of that sequence."""
    ids: bytes = b""
    logprobs: bytes = b""


class LogprobColumns(NamedTuple):
    """Log-probabilities of tokens, packed as in `StepOutput`."""

    tokens: bytes = b""
    ranks: bytes = b""
    ids: bytes = b""
    values: bytes = b""


class InFlightStep(msgspec.Struct, frozen=True):
    """A launched step of R rows, with everything that its output needs. Plans applied meanwhile do not change it."""

    batch: StepBatch
    sequences: Int64
    """[R] ids of the sequences."""
    admissions: Int64
    """[R] admission number of each sequence, counted over all slots: no two sequences have the same number."""
    stop_ids: Int64
    """[R, longest list] ids that end each sequence, padded with -1."""
    full: Bool
    """[R] whether the row samples the last token that fits into the sequence's maximum length."""
    changes: int
    """The slot table's count of changes at the launch: still the same when none of its sequences has begun or ended."""
    left: Int64 | None = None
    """[R] number of tokens that each sequence may still have; None where no row samples more than one."""

    def finishes(self, tokens: Int64) -> UInt8:
        """Returns the `Finish` of each row [R], given the sampled `tokens` [R], some of which may be `NOT_FINITE`."""
        finishes = self.full * _LENGTH
        if self.stop_ids.size:
            stops = self.stop_ids == tokens[:, None]
            if np.count_nonzero(stops):
                finishes[self.batch.samples & stops.any(axis=1)] = Finish.STOP
        failed = tokens == NOT_FINITE
        if np.count_nonzero(failed):
            finishes[failed] = Finish.NOT_FINITE
        return finishes

    def cut(self, tokens: Int64, counts: Int64) -> tuple[Int64, Int64, UInt8]:
        """Cuts the `tokens` of each row, `counts` [R] of them, behind the one that ends its sequence.

        Returns the tokens that stay, the number of these in each row [R], and the `Finish` of each row [R].
        """
        assert self.left is not None
        rows, places = rows_and_places(counts)
        stops = (self.stop_ids[rows] == tokens[:, None]).any(axis=1)
        failed = tokens == NOT_FINITE
        counts, finishes = np.minimum(counts, self.left), np.zeros(len(counts), np.uint8)
        finishes[counts == self.left] = Finish.LENGTH
        ending = (stops | failed).nonzero()[0][::-1]  # the earliest of a row is written last
        ending = ending[places[ending] < counts[rows[ending]]]
        counts[rows[ending]] = places[ending] + ~failed[ending]
        finishes[rows[ending]] = np.where(failed[ending], Finish.NOT_FINITE, Finish.STOP)
        return tokens[places < counts[rows]], counts, finishes

    def columns(self, tokens: Int64, finishes: UInt8, alive: Bool | None) -> OutputColumns:
        """Returns the rows where `alive` [R] is true, packed; None: all rows."""
        sequences, starts, counts = self.sequences, self.batch.num_computed_tokens, self.batch.query_lens
        if alive is not None:
            sequences, starts, counts = sequences[alive], starts[alive], counts[alive]
            tokens, finishes = tokens[alive], finishes[alive]
        ends = finishes.tobytes()
        if Finish.NOT_FINITE in ends:
            tokens = np.maximum(tokens, -1)  # which `packed` turns into NO_TOKEN
        return OutputColumns(packed(sequences), packed(starts), packed(counts), packed(tokens), ends)

    def forced_columns(
        self, tokens: Int64, forced: Mapping[int, Sequence[int]], finishes: UInt8, alive: Bool
    ) -> OutputColumns:
        """Returns the rows where `alive` [R] is true, packed, with the tokens that follow those of rows that go on."""
        rows = alive.nonzero()[0]
        texts = [[token] if token >= 0 else [] for token in tokens[rows].tolist()]
        for index, row in enumerate(rows.tolist()):
            if not finishes[row]:
                texts[index] += forced.get(row, ())
        batch, counts = self.batch, np.array([len(each) for each in texts], np.int64)
        columns = packed(self.sequences[rows]), packed(batch.num_computed_tokens[rows]), packed(batch.query_lens[rows])
        joined = np.array([*chain.from_iterable(texts)], np.int64)
        return OutputColumns(*columns, packed(joined), finishes[rows].tobytes(), packed(counts))

    def cut_columns(
        self, tokens: Int64, counts: Int64, finishes: UInt8, accepted: Int64 | None = None
    ) -> OutputColumns:
        """Returns all rows, packed, with what `cut` has returned. `accepted` [R] of the drafts were right."""
        batch = self.batch
        starts = batch.num_computed_tokens
        rows = packed(self.sequences), packed(starts), packed(batch.ends - starts)
        drafts = b""
        if accepted is not None and batch.num_drafts is not None:
            some = batch.num_drafts.nonzero()[0]
            drafts = packed(np.stack((self.sequences[some], batch.num_drafts[some], accepted[some]), axis=1))
        return OutputColumns(*rows, packed(tokens), finishes.tobytes(), packed(counts), drafts)

    def logprob_columns(self, logprobs: Logprobs, rows: OutputColumns) -> list[LogprobColumns]:
        """Returns what the device reported of the tokens in these rows of the step, in parts of bounded size."""
        sequences = self.sequences[logprobs.rows]
        kept = np.isin(sequences, column(rows.sequences))
        if rows.token_counts:
            known = self.batch.ends.copy()
            known[np.isin(self.sequences, column(rows.sequences))] += column(rows.token_counts)
            # A token that was cut off is not reported.
            kept &= (logprobs.positions < known[logprobs.rows]) | ~self.batch.samples[logprobs.rows]
        ends = np.cumsum(logprobs.counts)
        parts = []
        for some in np.array_split(np.flatnonzero(kept), -(-int(logprobs.counts[kept].sum()) // MAX_ENTRIES) or 1):
            counts = logprobs.counts[some]
            entries = np.repeat(ends[some] - np.cumsum(counts), counts) + np.arange(counts.sum())
            tokens = np.stack((sequences[some], logprobs.positions[some], counts), axis=1)
            values = logprobs.values[entries].astype("<f4").tobytes()
            columns = LogprobColumns(
                packed(tokens), packed(logprobs.ranks[some]), packed(logprobs.ids[entries]), values
            )
            parts += [columns] if len(some) else []
        return parts

    def candidate_columns(self, candidates: Candidates) -> CandidateColumns:
        """Returns the candidates that the device reported for this step, packed."""
        counts = np.stack((self.sequences[candidates.rows], candidates.counts), axis=1)
        return CandidateColumns(packed(counts), packed(candidates.ids), candidates.logprobs.astype("<f4").tobytes())
