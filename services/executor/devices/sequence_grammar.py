"""A sequence's place in the grammar of its text."""

from collections.abc import Collection
from itertools import takewhile

import numpy as np
import numpy.typing as npt
import structlog
from llguidance import LLMatcher

UInt32 = npt.NDArray[np.uint32]

_log = structlog.get_logger()


class SequenceGrammar:
    """Follows one sequence through its grammar.

    It is created without a matcher, which takes a while to compile; the sequence is in no step before `start`. A
    grammar that cannot go on allows no token at all: the sequence then ends as one whose logits are not finite.

    Attributes:
        matcher: has consumed the sequence's tokens up to the last `advance`; None if there is none.
        ready: whether `start` was called.
    """

    def __init__(
        self, num_output: int, min_tokens: int, stop_ids: Collection[int], max_tokens: int = 0, *, forces: bool = False
    ) -> None:
        """Begins with `num_output` tokens generated so far, of `max_tokens`.

        Before `min_tokens` of them the `stop_ids` are allowed only where nothing else is. `forces`: whether tokens may
        be appended that are not sampled.
        """
        self.matcher: LLMatcher | None = None
        self.ready = False
        self._new: list[int] = []  # sampled since the last mask
        self._num_output = num_output
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._forces = forces
        self._stop_ids = frozenset(stop_ids)

    def start(self, matcher: LLMatcher | None) -> None:
        """Sets the matcher, which has consumed the tokens generated so far; None: there is none, for a reason that is
        logged."""
        self.matcher = matcher
        self.ready = True

    def sampled(self, token: int) -> None:
        """Adds a generated token, for the next mask."""
        self._new.append(token)

    def advance(self) -> LLMatcher | None:
        """Consumes the new tokens and returns the matcher."""
        if self._new and self.matcher is not None:
            self.matcher.consume_tokens(self._new)
        self._num_output += len(self._new)
        self._new.clear()
        return self.matcher

    def forced(self) -> list[int]:
        """Adds the tokens that must come next, and returns them: each is the only one that its mask would allow.

        The last token of a text is never among them, nor is one that ends it: these are sampled.
        """
        if not self._forces or (self._new and self._new[-1] in self._stop_ids):
            return []
        matcher = self.advance()
        if matcher is None:
            return []
        tokens = matcher.compute_ff_tokens()[: max(0, self._max_tokens - self._num_output - 1)]
        tokens = list(takewhile(lambda token: token not in self._stop_ids, tokens))
        self._new += tokens
        return tokens

    def count_allowed(self, tokens: list[int]) -> int:
        """Returns how many of the `tokens`, from the first on, the grammar allows to follow."""
        matcher = self.advance()
        return 0 if matcher is None or matcher.is_error() else matcher.validate_tokens(tokens)

    def complete(self, mask: UInt32) -> None:
        """Completes the matcher's mask [ceil(vocabulary / 32)] in place."""
        if self.matcher is None or self.matcher.is_error():
            reason = "no matcher" if self.matcher is None else self.matcher.get_error()
            _log.warning("grammar_failed", reason=reason, tokens=self._num_output)
            mask[:] = 0
        elif self._num_output < self._min_tokens:
            others = mask.copy()
            for token in self._stop_ids:
                others[token // 32] &= ~np.uint32(1 << token % 32)
            if others.any():
                mask[:] = others
