"""The outcome of a request beside its texts: the best completions, times and drafts. Pure but for the clock."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec

from pagewire.shared.messages.done import ReportedLogprobs
from pagewire.shared.messages.request_metrics import Metrics, SpeculativeDecoding


class Scored(Protocol):
    """A completion with the log-probabilities of its tokens."""

    logprobs: list[ReportedLogprobs] | None


C = TypeVar("C", bound=Scored)


def best_completions(completions: Sequence[C], prompts: int, best: int) -> list[C]:
    """Returns the `best` completions of each of the `prompts` by cumulative log-probability, the best first.

    The completions of a prompt follow each other. Equal ones keep their order.
    """
    per_prompt = len(completions) // prompts
    ranked: list[C] = []
    for begin in range(0, len(completions), per_prompt):
        ranked += sorted(completions[begin : begin + per_prompt], key=_cumulative_logprob, reverse=True)[:best]
    return ranked


def _cumulative_logprob(completion: Scored) -> float:
    return sum(memoryview(reported.values).cast("f")[0] for reported in completion.logprobs or ())


@dataclass(slots=True)
class Times:
    """The stages of a request as Unix times; 0: it has not reached the stage, or another detokenizer owned it then."""

    arrived: float
    scheduled: float = 0.0
    """Begin of the first step with a token of the prompts."""
    answered: float = 0.0
    """Time of the first generated token."""
    ended: float = 0.0

    def note_row(self, elapsed_us: int, *, token: bool) -> None:
        """Records a step with a row of the request; `token`: whether the row has its first token."""
        now = time.time()
        self.scheduled = self.scheduled or now - elapsed_us / 1e6
        if token:
            self.answered = self.answered or now

    def note_end(self) -> None:
        """Records the end."""
        self.ended = time.time()

    def metrics(self) -> Metrics:
        """Returns the durations that the client of an ended request gets."""
        return Metrics(
            queued_time=_between(self.arrived, self.scheduled),
            prefill_time=_between(self.scheduled, self.answered),
            decode_time=_between(self.answered, self.ended),
            e2e_latency=max(0.0, self.ended - self.arrived),
        )

    def packed(self) -> tuple[float, float, float, float]:
        """Returns the times for `Done.times`."""
        return self.arrived, self.scheduled, self.answered, self.ended


@dataclass(slots=True)
class DraftCounts:
    """The drafts of a request that steps have verified."""

    drafted: int = 0
    """Number of their tokens."""
    histogram: list[int] = field(default_factory=list)
    """Entry i: number of drafts of which i tokens were right."""

    @property
    def accepted(self) -> int:
        """Number of the tokens that were right."""
        return sum(i * count for i, count in enumerate(self.histogram))

    def add(self, drafted: int, accepted: int) -> None:
        """Counts a draft of which `accepted` of the `drafted` tokens were right."""
        self.drafted += drafted
        self.histogram += [0] * (accepted + 1 - len(self.histogram))
        self.histogram[accepted] += 1

    def metrics(self) -> SpeculativeDecoding | msgspec.UnsetType:
        """Returns the figures that the client gets; unset: there were no drafts."""
        if not self.drafted:
            return msgspec.UNSET
        drafts, accepted = sum(self.histogram), self.accepted
        return SpeculativeDecoding(
            num_spec_steps=drafts,
            num_draft_tokens=self.drafted,
            num_accepted_draft_tokens=accepted,
            acceptance_histogram=self.histogram,
            mean_acceptance_length=1 + accepted / drafts,
            draft_acceptance_rate=accepted / self.drafted,
        )


def _between(first: float, second: float) -> float | None:
    return max(0.0, second - first) if first and second else None
