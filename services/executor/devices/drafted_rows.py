"""The places of a step where its rows sample: with drafted tokens, a row has several."""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from pagewire.services.executor.devices.protocol import Int64, StepBatch, rows_and_places


class DraftedRows:
    """The rows of a step that sample, each at 1 + its number of drafts places: place i is behind i drafts.

    Attributes:
        rows: [M] their numbers in the batch.
        slots: [M] their slots.
        ends: [M] position of the first token that each of them samples.
        num_drafts: [M] drafted tokens of each.
        first: [M] index of the first place of each among all places.
        places: [P] index in the batch of the token before each place.
        owners: [P] index in `rows` of each place's row.
        positions: [P] position of the token that is sampled there.
    """

    def __init__(self, batch: StepBatch) -> None:
        self.rows = batch.samples.nonzero()[0]
        self.slots, self.ends = batch.slots[self.rows], batch.ends[self.rows]
        self.num_drafts = np.zeros_like(self.rows) if batch.num_drafts is None else batch.num_drafts[self.rows]
        counts = self.num_drafts + 1
        self.first = counts.cumsum() - counts
        self.owners, offsets = rows_and_places(counts)
        self.places = batch.query_lens.cumsum()[self.rows][self.owners] - counts[self.owners] + offsets
        self.positions = self.ends[self.owners] + offsets
        self._token_ids = batch.token_ids
        self._num_rows = len(batch.slots)

    @property
    def indices(self) -> Int64:
        """[P] index of each place, where each row that samples nothing counts as one place."""
        counts = np.ones(self._num_rows, np.int64)
        counts[self.rows] += self.num_drafts
        return (counts.cumsum() - counts)[self.rows][self.owners] + self.positions - self.ends[self.owners]

    def drafts(self, row: int) -> list[int]:
        """Returns the drafted tokens of the row `rows[row]`."""
        first = int(self.places[self.first[row]]) + 1
        tokens: list[int] = self._token_ids[first : first + int(self.num_drafts[row])].tolist()
        return tokens

    def agree(self, some: Int64, place: int, tokens: Int64) -> Int64:
        """Returns those of `some` [S] rows whose `tokens` [S], sampled at this place, are the drafted ones."""
        some, tokens = some[place < self.num_drafts[some]], tokens[place < self.num_drafts[some]]
        following: Int64 = some[self._token_ids[self.places[self.first[some] + place] + 1] == tokens]
        return following

    def accepted(self, tokens: Int64) -> list[list[int]]:
        """Returns the tokens of each row [M] up to the first that is not drafted, by the `tokens` [P] of all places."""
        drafted = self._token_ids[np.minimum(self.places + 1, len(self._token_ids) - 1)]
        last = self.first + self.num_drafts
        wrong = tokens != drafted
        wrong[last] = True
        texts, begin = [], 0
        for end in (last + 1).tolist():
            texts.append(tokens[begin : begin + int(wrong[begin:end].argmax()) + 1].tolist())
            begin = end
        return texts

    def columns(self, texts: Sequence[Sequence[int]]) -> tuple[Int64, Int64]:
        """Returns the tokens of all rows of the batch, row after row, and the number of each row's [R]."""
        counts = np.zeros(self._num_rows, np.int64)
        counts[self.rows] = [len(text) for text in texts]
        return np.array([*chain.from_iterable(texts)], np.int64), counts
