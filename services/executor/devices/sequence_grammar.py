"""A sequence's place in the grammar of its text."""

from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import Protocol

import numpy as np
import numpy.typing as npt
import structlog
from llguidance import LLMatcher

UInt32 = npt.NDArray[np.uint32]

_log = structlog.get_logger()


class OpenMatcher(Protocol):
    """Compiles the grammar of one sequence."""

    def __call__(self, output: Sequence[int], *, fresh: bool) -> LLMatcher | None:
        """Returns a matcher that has consumed the `output`, `fresh`: with a lexer of its own; None: there is none, for
        a reason that is logged."""


class SequenceGrammar:
    """Follows one sequence through its grammar.

    It is created without a matcher, which takes a while to compile; the sequence is in no step before `start`. A
    grammar that goes beyond a limit allows no token at all, as if the logits were not finite.

    Attributes:
        matcher: has consumed the sequence's tokens up to the last `advance`; None: the grammar cannot be compiled.
        ready: whether `start` was called.
    """

    def __init__(
        self,
        output: Sequence[int],
        min_tokens: int,
        stop_ids: Collection[int],
        max_tokens: int,
        open_matcher: OpenMatcher,
        on_limit: Callable[[], None],
        *,
        forces: bool,
    ) -> None:
        """Begins with the `output` so far, of `max_tokens`.

        Before `min_tokens` of them the `stop_ids` are allowed only where nothing else is. `open_matcher` compiles the
        grammar. `on_limit` is called where it goes beyond a limit. `forces`: whether tokens may be appended that are
        not sampled.
        """
        self.matcher: LLMatcher | None = None
        self.ready = False
        self._abandoned = False
        self._new: list[int] = []  # sampled since the last mask
        self._output = list(output)
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._open_matcher = open_matcher
        self._on_limit = on_limit
        self._forces = forces
        self._stop_ids = frozenset(stop_ids)

    def abandon(self) -> None:
        """Has `start` open nothing, as the sequence has gone."""
        self._abandoned = True

    def start(self) -> None:
        """Opens the matcher."""
        try:
            if not self._abandoned:
                self.matcher = self._open_matcher(self._output, fresh=False)
        finally:  # whatever happens, the sequence does not wait for ever
            self.ready = True

    def sampled(self, token: int) -> None:
        """Adds a generated token, for the next mask."""
        self._new.append(token)

    def advance(self) -> LLMatcher | None:
        """Consumes the new tokens and returns the matcher."""
        if self._new and self.matcher is not None:
            self.matcher.consume_tokens(self._new)
        self._output += self._new
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
        tokens = matcher.compute_ff_tokens()[: max(0, self._max_tokens - len(self._output) - 1)]
        tokens = list(takewhile(lambda token: token not in self._stop_ids, tokens))
        self._new += tokens
        return tokens

    def undo(self, count: int) -> None:
        """Takes back the last `count` tokens, which `advance` has consumed."""
        if self.matcher is not None:
            self.matcher.rollback(count)
        del self._output[len(self._output) - count :]

    def count_allowed(self, tokens: list[int]) -> int:
        """Returns how many of the `tokens`, from the first on, the grammar allows to follow."""
        matcher = self.advance()
        return 0 if matcher is None or matcher.is_error() else matcher.validate_tokens(tokens)

    def complete(self, mask: UInt32, *, drafted: bool = False) -> None:
        """Completes the matcher's mask [ceil(vocabulary / 32)] in place. A limit beyond `drafted` tokens, which may be
        wrong, is no end."""
        if (self.matcher is None or self.matcher.is_error()) and not self._open_again(mask):
            if not drafted:
                reason = "no matcher" if self.matcher is None else self.matcher.get_error()
                _log.warning("grammar_failed", reason=reason, tokens=len(self._output))
                self._on_limit()
            mask[:] = 0
        elif len(self._output) < self._min_tokens:
            others = mask.copy()
            for token in self._stop_ids:
                others[token // 32] &= ~np.uint32(1 << token % 32)
            if others.any():
                mask[:] = others

    def _open_again(self, mask: UInt32) -> bool:
        """Writes the mask of another matcher that takes the place of a failed one; returns False if it fails, too.

        The lexer's states, which are limited, are those of all texts with the grammar; a text may fail only for the
        states that it needs itself. Another sequence may have opened a fresh matcher before.
        """
        for fresh in (False, True):
            matcher = self._open_matcher(self._output, fresh=fresh)
            bits = b"" if matcher is None or matcher.is_error() else matcher.compute_bitmask()
            if matcher is not None and not matcher.is_error():
                self.matcher = matcher
                mask[:] = np.frombuffer(bits, np.uint32)[: len(mask)]
                return True
        return False
