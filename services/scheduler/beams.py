"""Beam search as `transformers` does it: `generate(num_beams=B, do_sample=False, early_stopping=False)`. Pure.

A score is the sum of the log-probabilities of a beam's tokens, in float32. In each round the likeliest continuations of
all beams are put in one order. Those among its first B that end the text are finished: their score is divided by their
length to the power of the length penalty, and the best B of all rounds are kept. The first B that go on are the next
beams. The search is over at the greatest length, or once B are finished and the best beam, at its present length, would
not be better than the worst of them.

Source: `GenerationMixin._beam_search` of transformers 5.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagewire.shared.messages.step import Finish

Float32 = npt.NDArray[np.float32]


class Candidates(NamedTuple):
    """What the model says of the next token of one beam: its likeliest tokens, at least B of them that end no text."""

    tokens: Sequence[int]
    logprobs: Float32


class Beam(NamedTuple):
    """A text that goes on."""

    tokens: list[int]
    """Behind the prompt."""
    score: np.float32


class Hypothesis(NamedTuple):
    """A text that has ended."""

    tokens: list[int]
    """Behind the prompt, with the token that ended it."""
    score: np.float32
    """With its length taken into account."""
    finish: Finish


class Continuation(NamedTuple):
    """A beam of the next round."""

    parent: int
    """Which beam of this round it continues."""
    token: int


class BeamSearch:
    """One search. It begins with one beam, the prompt, and has `width` from the second round on.

    Attributes:
        beams: those whose candidates the next round wants, best first; none once the search is over.
        finished: at most `width` hypotheses, best first. When the search is over, there are as many.
    """

    def __init__(self, width: int, max_tokens: int, length_penalty: float, stop_ids: Collection[int]) -> None:
        self.beams = [Beam([], np.float32(0))]
        self.finished: list[Hypothesis] = []
        self._width = width
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._stop_ids = np.array(sorted(stop_ids), np.int64)

    def advance(self, candidates: Sequence[Candidates]) -> list[Continuation]:
        """One round, with the candidates of each beam: the beams of the next one; none if the search is over."""
        length = len(self.beams[0].tokens) + 1
        parents = np.repeat(np.arange(len(candidates)), [len(found.tokens) for found in candidates])
        tokens = np.concatenate([np.array(found.tokens, np.int64) for found in candidates])
        with np.errstate(over="ignore"):  # of what is impossible anyway
            scores = np.concatenate(
                [found.logprobs + beam.score for found, beam in zip(candidates, self.beams, strict=True)]
            )
        order = np.lexsort((tokens, parents, -scores))  # the last key counts first
        ends = np.isin(tokens, self._stop_ids)
        last = length == self._max_tokens
        best = order[: self._width]
        for i in best[ends[best] | last]:
            finish = Finish.STOP if ends[i] else Finish.LENGTH
            self.finished.append(Hypothesis(self._text(parents[i], tokens[i]), self._weigh(scores[i], length), finish))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)  # stable: of equal ones the earlier
        del self.finished[self._width :]
        going = order[~ends[order]][: self._width]
        if last or not len(going) or not self._can_improve(scores[going[0]], length):
            self.beams = []
            return []
        self.beams = [Beam(self._text(parents[i], tokens[i]), scores[i]) for i in going]
        return [Continuation(int(parents[i]), int(tokens[i])) for i in going]

    def _text(self, parent: np.int64, token: np.int64) -> list[int]:
        return [*self.beams[parent].tokens, int(token)]

    def _can_improve(self, score: np.float32, length: int) -> bool:
        full = len(self.finished) == self._width
        return not full or bool(self._weigh(score, length) > self.finished[-1].score)

    def _weigh(self, score: np.float32, length: int) -> np.float32:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            return np.float32(score / np.float32(np.power(float(length), self._length_penalty)))
