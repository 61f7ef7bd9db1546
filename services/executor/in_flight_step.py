"""A step between its launch and its output."""

from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pagewire.services.executor.columns import packed
from pagewire.services.executor.devices.protocol import Bool, Candidates, Int64, StepBatch
from pagewire.shared.messages.step import Finish

UInt8 = npt.NDArray[np.uint8]

_LENGTH = np.uint8(Finish.LENGTH)


class Columns(NamedTuple):
    """The rows of one step, packed as `StepOutput` carries them."""

    sequences: bytes = b""
    starts: bytes = b""
    counts: bytes = b""
    tokens: bytes = b""
    finishes: bytes = b""


class CandidateColumns(NamedTuple):
    """The candidates of one step, packed as `StepOutput` carries them."""

    counts: bytes
    """Pairs of a sequence and the number of its candidates."""
    ids: bytes
    logprobs: bytes


class InFlightStep(msgspec.Struct, frozen=True):
    """A launched step of R rows, with all that its output needs, whatever plans do to its slots until then."""

    batch: StepBatch
    sequences: Int64
    """[R] ids of the sequences."""
    admissions: Int64
    """[R] which admission to its slot each sequence is, counted over all slots: no two sequences have the same."""
    stop_ids: Int64
    """[R, most] ids that end each sequence, filled up with -1."""
    full: Bool
    """[R] whether the row samples the last token that its sequence may have."""

    def finishes(self, tokens: Int64) -> UInt8:
        """[R] the `Finish` of each row, by the `tokens` [R] that the device picked."""
        finishes = self.full * _LENGTH
        if self.stop_ids.size:
            finishes[self.batch.samples & (self.stop_ids == tokens[:, None]).any(axis=1)] = Finish.STOP
        return finishes

    def columns(self, tokens: Int64, finishes: UInt8, alive: Bool | None) -> Columns:
        """The rows that are `alive`, packed; None: all of them."""
        sequences, starts, counts = self.sequences, self.batch.num_computed_tokens, self.batch.query_lens
        if alive is not None:
            sequences, starts, counts = sequences[alive], starts[alive], counts[alive]
            tokens, finishes = tokens[alive], finishes[alive]
        # Of the tokens, -1 becomes NO_TOKEN.
        return Columns(packed(sequences), packed(starts), packed(counts), packed(tokens), finishes.tobytes())

    def candidate_columns(self, candidates: Candidates) -> CandidateColumns:
        """The candidates that the device reported of this step, packed."""
        counts = np.stack((self.sequences[candidates.rows], candidates.counts), axis=1)
        return CandidateColumns(packed(counts), packed(candidates.ids), candidates.logprobs.astype("<f4").tobytes())
