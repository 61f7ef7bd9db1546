"""Reads the tokens of a step whose rows have drafted tokens, once the host has those of all places."""

from typing import NamedTuple

import numpy as np

from pagewire.services.executor.devices.drafted_rows import DraftedRows
from pagewire.services.executor.devices.masks import Masks
from pagewire.services.executor.devices.protocol import Bool, Int64


class ReadTokens(NamedTuple):
    """The tokens that the rows of a step keep."""

    tokens: Int64
    """[N] of all rows, row after row, with those that grammars force behind them."""
    counts: Int64
    """[R] number of the tokens of each row."""
    kept: Bool
    """[P] whether the token of each place of the step is among them."""


class DraftedTokens:
    """The rows of a step with drafts, and the grammars of those that sample, which follow the tokens that are kept."""

    def __init__(self, rows: DraftedRows, masks: Masks) -> None:
        """`masks` has the grammars of the rows."""
        self._rows = rows
        self._masks = masks
        self._grammars = [masks.of(slot) for slot in rows.slots.tolist()]

    def read(self, tokens: Int64) -> ReadTokens:
        """Returns what the rows keep of the `tokens` [P] of all places. Called once: grammars advance."""
        rows, indices = self._rows, self._rows.indices
        texts = rows.accepted(tokens[indices])
        kept = np.zeros(len(tokens), np.bool_)
        for row, (text, grammar) in enumerate(zip(texts, self._grammars, strict=True)):
            kept[indices[rows.first[row] : rows.first[row] + len(text)]] = True
            if grammar is not None:
                for token in text:
                    if token >= 0:
                        grammar.sampled(token)
                if text[-1] >= 0:
                    text.extend(grammar.forced())
                elif self._masks.of(int(rows.slots[row])) is grammar:
                    self._masks.report_limit(int(rows.slots[row]))
        return ReadTokens(*rows.columns(texts), kept & (tokens >= 0))
