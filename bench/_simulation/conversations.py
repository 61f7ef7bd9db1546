"""Conversations of several turns with lengths of ShareGPT: a prompt is all that was said before, and a question."""

import random
from collections.abc import Sequence

from pagewire.bench._simulation.loads import sharegpt_lengths
from pagewire.bench._simulation.pipeline import Request

TURNS = 4
"""Questions of a conversation, on average: after each, it ends with the same probability. Assumed."""
LONGEST = 4096
"""Tokens of a conversation at most: it ends before a turn that would pass them."""
_VOCABULARY = 32_000


class Client:
    """Talks without end: after an answer it thinks, then asks again or begins anew. A closed loop."""

    def __init__(self, number: int, seed: int, think: float) -> None:
        """`think`: mean of the exponential time between an answer and the next question, in seconds."""
        self._number = number
        self._draw = random.Random(f"{seed} {number}")
        self._think = think
        self._said: list[int] = []

    def ask(self, now: float) -> Request:
        """The next question."""
        prompt, output = self._draw.choice(sharegpt_lengths())
        if len(self._said) + prompt + output > LONGEST:
            self._said = []
        self._said = self._said + self._draw.choices(range(_VOCABULARY), k=prompt)
        at = now + self._draw.expovariate(1 / self._think)
        return Request(at, self._said, output, client=self._number)

    def hear(self, answer: Sequence[int]) -> None:
        """The end of an answer."""
        self._said = self._said + list(answer)
        if self._draw.random() < 1 / TURNS:
            self._said = []
