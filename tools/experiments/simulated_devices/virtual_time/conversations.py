"""Conversations with lengths of ShareGPT: each prompt repeats all earlier turns and adds a question."""

import random
from collections.abc import Sequence

from pagewire.bench._common.loads import Request, sharegpt_lengths

TURNS = 4
"""Mean number of questions of a conversation, which ends after each with the same probability. Assumed."""
LONGEST = 4096
"""Largest number of tokens of a conversation, which ends before a turn that would exceed it."""
_VOCABULARY = 32_000


class Client:
    """A client in a closed loop: after an answer it pauses, then asks again or begins a new conversation."""

    def __init__(self, number: int, seed: int, think: float) -> None:
        """`think` is the mean of the exponential time between an answer and the next question, in seconds."""
        self._number = number
        self._draw = random.Random(f"{seed} {number}")
        self._think = think
        self._history: list[int] = []

    def ask(self, now: float) -> Request:
        """Returns the next request, which is sent after a pause that begins at `now`."""
        prompt, output = self._draw.choice(sharegpt_lengths())
        if len(self._history) + prompt + output > LONGEST:
            self._history = []
        self._history = self._history + self._draw.choices(range(_VOCABULARY), k=prompt)
        at = now + self._draw.expovariate(1 / self._think)
        return Request(at, self._history, output, client=self._number)

    def receive(self, answer: Sequence[int]) -> None:
        """Takes in a complete answer."""
        self._history = self._history + list(answer)
        if self._draw.random() < 1 / TURNS:
            self._history = []
