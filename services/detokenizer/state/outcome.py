"""What a request's clients are told at its end beside the texts: which completions are the best, and its times."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pagewire.shared.messages.client import Metrics
from pagewire.shared.messages.done import TokenLogprobs


class Scored(Protocol):
    """A completion with the log-probabilities of its tokens."""

    logprobs: list[TokenLogprobs] | None


C = TypeVar("C", bound=Scored)


def best_completions(completions: Sequence[C], prompts: int, best: int) -> list[C]:
    """Returns of each of the `prompts` the `best` completions by cumulative log-probability, the best first.

    The completions of a prompt follow each other. Of equal ones, the first is better.
    """
    each = len(completions) // prompts
    found: list[C] = []
    for begin in range(0, len(completions), each):
        found += sorted(completions[begin : begin + each], key=_cumulative_logprob, reverse=True)[:best]
    return found


def _cumulative_logprob(completion: Scored) -> float:
    return sum(memoryview(found.values).cast("f")[0] for found in completion.logprobs or ())


@dataclass(slots=True)
class Times:
    """When a request was where, as Unix times; 0: not yet, or another detokenizer had it then."""

    arrived: float
    scheduled: float = 0.0
    """Begin of the first step with a token of its prompts."""
    answered: float = 0.0
    """First generated token."""
    ended: float = 0.0

    def note_row(self, elapsed_us: int, *, token: bool) -> None:
        """Records a step with a row of the request, and whether that has brought its first token."""
        now = time.time()
        self.scheduled = self.scheduled or now - elapsed_us / 1e6
        if token:
            self.answered = self.answered or now

    def note_end(self) -> None:
        """Records the end."""
        self.ended = time.time()

    def metrics(self) -> Metrics:
        """Returns what the client of an ended request is told."""
        return Metrics(
            queued_time=_between(self.arrived, self.scheduled),
            prefill_time=_between(self.scheduled, self.answered),
            decode_time=_between(self.answered, self.ended),
            e2e_latency=max(0.0, self.ended - self.arrived),
        )

    def packed(self) -> tuple[float, float, float, float]:
        """Returns the times for `Done.times`."""
        return self.arrived, self.scheduled, self.answered, self.ended


def _between(first: float, second: float) -> float | None:
    return max(0.0, second - first) if first and second else None
