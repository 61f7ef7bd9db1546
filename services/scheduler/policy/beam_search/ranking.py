"""Beam search as `transformers` does it: `generate(num_beams=B, do_sample=False, early_stopping=False)`. Pure.

A beam's score is the sum of the log-probabilities of its tokens, in float32. Each round sorts the likeliest
continuations of all beams by score. The ones among the first B that end the text are finished: their score is divided
by their length to the power of the length penalty, and the best B of all rounds are kept. The first B continuations
that do not end the text are the next beams. The search ends at the greatest length, or once B texts are finished and
the best beam, at its present length, would not be better than the worst of them.

Source: `GenerationMixin._beam_search` of transformers 5.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagewire.shared.messages import pack
from pagewire.shared.messages.done import ReportedLogprobs
from pagewire.shared.messages.step import Finish

Float32 = npt.NDArray[np.float32]


class Candidates(NamedTuple):
    """The likeliest next tokens of one beam, with at least B among them that do not end the text."""

    tokens: Sequence[int]
    logprobs: Float32


class Hypothesis(NamedTuple):
    """A text."""

    tokens: list[int]
    """Token ids without the prompt, with the one that ended the text."""
    score: np.float32
    """Sum of log-probabilities; once the text has ended, divided by its length to the power of the length penalty."""
    finish: Finish = Finish.NONE
    """Reason for which the text has ended."""
    cumulative_logprob: np.float32 = np.float32(0)
    """Sum of the log-probabilities of its tokens."""
    reported: Sequence[ReportedLogprobs] = ()
    """Log-probabilities reported of each token; empty: none."""


class BeamSearch:
    """One search. Its first round has one beam, the prompt; the later rounds have `width` beams.

    Attributes:
        beams: the beams whose candidates the next round needs, best first; empty once the search has ended.
        finished: at most `width` hypotheses, best first; exactly `width` once the search has ended.

    >>> search = BeamSearch(width=2, max_tokens=2, length_penalty=1.0, stop_ids=[0])
    >>> search.advance([Candidates([5, 7, 0], np.log(np.float32([0.5, 0.3, 0.2])))])
    [(0, 5), (0, 7)]
    """

    def __init__(
        self,
        width: int,
        max_tokens: int,
        length_penalty: float,
        stop_ids: Collection[int],
        *,
        min_tokens: int = 0,
        num_logprobs: int = -1,
    ) -> None:
        """Begins a search.

        Args:
            width: number of beams, B.
            max_tokens: greatest length.
            length_penalty: exponent of the length.
            stop_ids: tokens that end a text.
            min_tokens: number of tokens below which no stop token is chosen.
            num_logprobs: likeliest tokens that are reported beside each chosen one; -1: nothing is reported.
        """
        self.beams = [Hypothesis([], np.float32(0))]
        self.finished: list[Hypothesis] = []
        self._width = width
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._stop_ids = np.array(sorted(stop_ids), np.int64)
        self._min_tokens = min_tokens
        self._num_logprobs = num_logprobs

    def advance(self, candidates: Sequence[Candidates]) -> list[tuple[int, int]]:
        """Runs a round with candidates of each beam; returns parent and token of the next beams, none at the end."""
        length = len(self.beams[0].tokens) + 1
        parents = np.repeat(np.arange(len(candidates)), [len(each.tokens) for each in candidates])
        tokens = np.concatenate([np.array(each.tokens, np.int64) for each in candidates])
        with np.errstate(over="ignore"):  # scores of impossible tokens
            scores = np.concatenate(
                [each.logprobs + beam.score for each, beam in zip(candidates, self.beams, strict=True)]
            )
        order = np.lexsort((tokens, parents, -scores))  # the last key counts first
        ends = np.isin(tokens, self._stop_ids)
        if length <= self._min_tokens:
            order = order[~ends[order]]
        begins = np.cumsum([0, *(len(each.tokens) for each in candidates)])
        last = length == self._max_tokens
        best = order[: self._width]
        for i in best[ends[best] | last]:
            finish = Finish.STOP if ends[i] else Finish.LENGTH
            reported = self._report(candidates, int(parents[i]), int(i - begins[parents[i]]))
            text, score = self._text(parents[i], tokens[i]), self._weigh(scores[i], length)
            self.finished.append(Hypothesis(text, score, finish, scores[i], reported))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)  # stable: of equal ones the earlier
        del self.finished[self._width :]
        kept = order[~ends[order]][: self._width]
        if last or not len(kept) or not self._can_improve(scores[kept[0]], length):
            self.beams = []
            return []
        self.beams = [
            Hypothesis(
                self._text(parents[i], tokens[i]),
                scores[i],
                reported=self._report(candidates, int(parents[i]), int(i - begins[parents[i]])),
            )
            for i in kept
        ]
        return [(int(parents[i]), int(tokens[i])) for i in kept]

    def _text(self, parent: np.int64, token: np.int64) -> list[int]:
        return [*self.beams[parent].tokens, int(token)]

    def _report(self, candidates: Sequence[Candidates], parent: int, place: int) -> list[ReportedLogprobs]:
        """Returns the log-probabilities reported of a text that continues a beam with the candidate at `place`."""
        if self._num_logprobs < 0:
            return []
        tokens, logprobs = candidates[parent]
        entries = [place, *range(min(self._num_logprobs, len(tokens)))]
        ids, values = pack(tokens[i] for i in entries), logprobs[entries].astype("<f4").tobytes()
        return [*self.beams[parent].reported, ReportedLogprobs(place + 1, ids, values)]

    def _can_improve(self, score: np.float32, length: int) -> bool:
        full = len(self.finished) == self._width
        return not full or bool(self._weigh(score, length) > self.finished[-1].score)

    def _weigh(self, score: np.float32, length: int) -> np.float32:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            return np.float32(score / np.float32(np.power(float(length), self._length_penalty)))
