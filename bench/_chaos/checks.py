"""Compares what a client has seen with the undisturbed answer."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pagewire.bench._chaos.requests import Request
from pagewire.shared.messages.client import Delta

EXACT, LOST, DUPLICATED, REORDERED, WRONG, HUNG = "exact", "lost", "duplicated", "reordered", "wrong", "hung"
FAILURES = (LOST, DUPLICATED, REORDERED, WRONG, HUNG)
ROUNDING = 1e-4
"""Largest difference of two log-probabilities of one token: what is lost is computed again in another batch, whose sums
are rounded in another order."""


@dataclass(slots=True)
class SeenChoice:
    """One completion, as far as it has arrived."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Token ids, which HTTP does not send."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request was refused before its first token, and its client has sent it again."""

    at: float
    message: str
    accepted: bool
    """Whether the stack had accepted it before."""


@dataclass(slots=True)
class Seen:
    """All that a client has seen of one request. Times are those of the monotonic clock."""

    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    choices: dict[int, SeenChoice] = field(default_factory=dict)
    error: str = ""
    """The reason why the request has ended without an answer."""
    hung: bool = False
    """Whether nothing has ended it in time."""
    cancelled: bool = False
    """Whether its client has cancelled it."""
    complete: bool = True
    """Whether the client waited for the end. Over HTTP, a client that cancels goes away."""
    progress: list[float] = field(default_factory=list)
    """Times at which the client was one step further than before: accepted, more text, the end."""
    keep_alives: int = 0
    reconnections: int = 0
    """Connections that have broken and were replaced."""
    refusals: list[Refusal] = field(default_factory=list)
    broken_off: list[dict[int, SeenChoice]] = field(default_factory=list)
    """Choices that earlier connections brought."""
    conflicts: list[str] = field(default_factory=list)
    """Frames for the same place that were not the same: a reader that does not drop repetitions sees both."""

    @property
    def begun(self) -> bool:
        """Whether a part of a text has arrived."""
        return any(choice.text for choice in self.choices.values())

    def choice(self, index: int) -> SeenChoice:
        """Returns one completion."""
        return self.choices.setdefault(index, SeenChoice())

    def pauses(self) -> Iterable[tuple[float, float]]:
        """Returns the times between which the client was not one step further."""
        return pairwise([self.began, *self.progress, self.ended])


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of one request."""

    outcome: str
    """`EXACT` or one of `FAILURES`."""
    reason: str = ""


def judge(request: Request, wanted: Seen, seen: Seen) -> Verdict:
    """Compares one request with its undisturbed answer. Refusals are not judged here."""
    if seen.hung:
        return Verdict(HUNG, seen.error or "it has not ended")
    if seen.error:
        return Verdict(LOST, seen.error)
    if seen.conflicts:
        return Verdict(DUPLICATED, seen.conflicts[0])
    for earlier in seen.broken_off:
        for index, part in earlier.items():
            if not _begins(wanted.choice(index), part):
                return Verdict(
                    WRONG, f"choice {index}, before its connection broke: {_difference(wanted, index, part)}"
                )
    for index in sorted(wanted.choices.keys() | seen.choices.keys()):
        verdict = _judge_choice(request, wanted, seen, index)
        if verdict.outcome != EXACT:
            return verdict
    return Verdict(EXACT)


def is_repetition(first: Delta, again: Delta) -> bool:
    """Returns whether the second of two deltas for the same place says what the first one says."""
    if (first.text, first.token_ids, first.prompt_logprobs) != (again.text, again.token_ids, again.prompt_logprobs):
        return False
    ours, theirs = first.logprobs or [], again.logprobs or []
    return len(ours) == len(theirs) and all(
        one.keys() == other.keys() and all(abs(one[token].logprob - other[token].logprob) < ROUNDING for token in one)
        for one, other in zip(ours, theirs, strict=True)
    )


def _judge_choice(request: Request, wanted: Seen, seen: Seen, index: int) -> Verdict:
    if index not in wanted.choices:
        return Verdict(WRONG, f"there is a choice {index}")
    expected, actual = wanted.choices[index], seen.choice(index)
    if actual == expected:
        return Verdict(EXACT)
    difference = f"choice {index}: {_difference(wanted, index, actual)}"
    if request.cancel_after and seen.cancelled and _begins(expected, actual):
        ends = {None} if not seen.complete else {"cancelled"}
        return Verdict(EXACT) if actual.finish_reason in ends else Verdict(WRONG, difference)
    want, have = _units(expected, actual)
    if want == have:
        return Verdict(WRONG, difference)
    if sorted(want) == sorted(have):
        return Verdict(REORDERED, difference)
    if len(have) < len(want) and _is_subsequence(have, want):
        return Verdict(LOST, difference)
    if len(have) > len(want) and _is_subsequence(want, have):
        return Verdict(DUPLICATED, difference)
    return Verdict(WRONG, difference)


def _units(expected: SeenChoice, actual: SeenChoice) -> tuple[Sequence[int | str], Sequence[int | str]]:
    """Returns what is compared: token ids, or the words of texts without them."""
    if expected.token_ids:
        return expected.token_ids, actual.token_ids
    return expected.text.split(" "), actual.text.split(" ")


def _begins(expected: SeenChoice, part: SeenChoice) -> bool:
    ids = part.token_ids
    return expected.text.startswith(part.text) and expected.token_ids[: len(ids)] == ids


def _is_subsequence(part: Sequence[int | str], whole: Sequence[int | str]) -> bool:
    rest = iter(whole)
    return all(any(other == unit for other in rest) for unit in part)


def _difference(wanted: Seen, index: int, actual: SeenChoice) -> str:
    expected = wanted.choice(index)
    want, have = _units(expected, actual)
    at = next(
        (i for i, pair in enumerate(zip(want, have, strict=False)) if pair[0] != pair[1]), min(len(want), len(have))
    )
    return (
        f"{len(have)} of {len(want)} tokens or words, the first difference at {at} of {actual.text[-40:]!r}, "
        f"ended by {actual.finish_reason} {actual.stop_reason!r} instead of {expected.finish_reason} "
        f"{expected.stop_reason!r}"
    )
