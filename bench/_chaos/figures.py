"""The figures of a run: what became of its requests, and the pauses that clients saw, per kind of fault."""

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pagewire.bench._chaos.checks import EXACT, FAILURES, LOST, Refusal, Seen, Verdict, judge
from pagewire.bench._chaos.faults import Applied
from pagewire.bench._chaos.requests import Request
from pagewire.bench._chaos.schedule import DAMAGE, DELETE, EDIT, FULL, JOIN, KINDS, PURGE, TERMINATE
from pagewire.bench._common.output import markdown
from pagewire.services.detokenizer.adopter import UNSTORED_AFTER

NOTICED_WITHIN = 10.0
"""Seconds after an operator has changed the store within which its requests are refused, where no core is free."""
REFUSED_WITHIN = {
    FULL: 5.0,
    EDIT: NOTICED_WITHIN,
    DELETE: NOTICED_WITHIN,
    PURGE: NOTICED_WITHIN,
    DAMAGE: UNSTORED_AFTER + NOTICED_WITHIN,
}
"""Seconds after a fault of the store within which requests may be refused, by action. What a disk loses may be requests
that nobody has accepted yet, whose clients wait longer."""
NONE = "none"
"""Stands for a fault where there was none."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended, and what became of it."""

    request: Request
    seen: Seen
    verdict: Verdict
    refused_at: float = 0.0
    """Time at which it was refused for no good reason; 0: never."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A time in which a client was not one step further."""

    seconds: float
    began: float
    """On the monotonic clock."""
    request: str


@dataclass(frozen=True, slots=True)
class Row:
    """All faults of one kind."""

    kind: str
    faults: int
    requests: int
    """Requests that were running during one of them."""
    outcomes: dict[str, int]
    """Number of requests by outcome, without the exact ones."""
    refused: int
    """Times that a request was refused before its first token, where that is allowed, and sent again."""
    keep_alives: int
    recovery: float
    """Median of the seconds until every service was ready again."""
    pauses: list[float]
    """Longest pause in seconds that a client saw in each fault."""


def examine(request: Request, wanted: Seen, seen: Seen, faults: Sequence[Applied]) -> Ended:
    """Judges a request. It is lost as well if it was refused although the fault is no reason for that."""
    verdict = judge(request, wanted, seen)
    for refusal in seen.refusals if verdict.outcome == EXACT else ():
        if not any(_may_refuse(fault, refusal, request) for fault in faults):
            reason = f"refused{' after it was accepted' * refusal.accepted}: {refusal.message}"
            return Ended(request, seen, Verdict(LOST, reason), refusal.at)
    return Ended(request, seen, verdict)


def _may_refuse(applied: Applied, refusal: Refusal, request: Request) -> bool:
    """Returns whether a request may be refused then: while the store is full or its settings are wrong, after its items
    were deleted or lost, by what is being drained, and where others say at once that their neighbour is gone: one of
    several models."""
    at = refusal.at
    if (within := REFUSED_WITHIN.get(applied.fault.action)) is not None:
        return applied.began <= at <= applied.recovered + within
    refuses = applied.fault.action in {TERMINATE, JOIN} or request.model
    return bool(refuses) and not refusal.accepted and applied.began <= at <= applied.recovered


def cause(each: Ended, faults: Sequence[Applied]) -> Applied | None:
    """Returns the fault that a request's outcome is counted under.

    For a hung one, that is the first one after its last step. For a refused one it is the last one before the refusal,
    and for others before the end, unless the stack had recovered from it before the request began.
    """
    seen = each.seen
    if seen.hung:
        last = max([seen.began, *seen.progress])
        return next((fault for fault in faults if fault.recovered >= last), None)
    at = each.refused_at or seen.ended
    before = [fault for fault in faults if fault.began <= at and fault.recovered >= seen.began]
    return before[-1] if before else None


def pauses(faults: Sequence[Applied], ended: Sequence[Ended]) -> list[Pause]:
    """Returns, by fault, the longest time that a client waited for a step. A pause belongs to one fault.

    If several faults happened during a pause, that is the one that had most of it.
    """
    longest = [Pause(0.0, 0.0, "")] * len(faults)
    recovered = [fault.recovered for fault in faults]
    for each in ended:
        if each.request.timed and not each.seen.refusals:
            for begin, end in each.seen.pauses():
                first = bisect_right(recovered, begin)  # faults come one after the other
                shares: list[tuple[float, int]] = []
                for hit in range(first, len(faults)):
                    if faults[hit].began >= end:
                        break
                    shares.append((min(end, recovered[hit]) - max(begin, faults[hit].began), hit))
                if shares and end - begin > longest[max(shares)[1]].seconds:
                    longest[max(shares)[1]] = Pause(end - begin, begin, str(each.request))
    return longest


def rows(faults: Sequence[Applied], ended: Sequence[Ended]) -> list[Row]:
    """Returns a row per kind of fault that has happened, and one for failures without any."""
    longest = pauses(faults, ended)
    by_kind: dict[str, list[Ended]] = {}
    for each in ended:
        hit = cause(each, faults)
        by_kind.setdefault(hit.fault.kind if hit else NONE, []).append(each)
    result = []
    for kind in (*KINDS, NONE):
        same = [i for i, fault in enumerate(faults) if fault.fault.kind == kind]
        theirs = by_kind.get(kind, [])
        counts = {name: sum(each.verdict.outcome == name for each in theirs) for name in FAILURES}
        if same or any(counts.values()):
            result.append(
                Row(
                    kind,
                    len(same),
                    len(theirs),
                    counts,
                    sum(len(each.seen.refusals) for each in theirs),
                    sum(each.seen.keep_alives for each in theirs),
                    statistics.median([faults[i].recovered - faults[i].over for i in same] or [0.0]),
                    [longest[i].seconds for i in same],
                )
            )
    return result


def table(label: str, rows: Sequence[Row], cold_start: float) -> list[str]:
    """Returns a line per kind of fault, in Markdown; `label` names the device."""
    head = " | ".join((label, "faults", "requests", *FAILURES, "refused", "keep-alives", "pause s, median", "longest"))
    lines = [
        _line(row.kind + (f" (cold start {cold_start:.1f} s)" * (row.kind == "kill:executor")), row) for row in rows
    ]
    everything = Row(
        "all",
        sum(row.faults for row in rows),
        sum(row.requests for row in rows),
        {name: sum(row.outcomes[name] for row in rows) for name in FAILURES},
        sum(row.refused for row in rows),
        sum(row.keep_alives for row in rows),
        0.0,
        [pause for row in rows for pause in row.pauses],
    )
    return markdown(head, [*lines, _line("all", everything)])


def _line(name: str, row: Row) -> str:
    counts = (row.faults, row.requests, *row.outcomes.values(), row.refused, row.keep_alives)
    pauses = (statistics.median(row.pauses), max(row.pauses)) if row.pauses else (0.0, 0.0)
    return " | ".join((name, *map(str, counts), *(f"{pause:.2f}" for pause in pauses)))


def failures(ended: Iterable[Ended], faults: Sequence[Applied], start: float) -> list[str]:
    """Returns a line per request that did not end exactly, with what happened and when."""
    lines = []
    for each in ended:
        if each.verdict.outcome != EXACT:
            hit = cause(each, faults)
            during = (
                f"{hit.fault.kind} of {hit.fault.seconds:.1f} s at {hit.began - start:.1f} s" if hit else "no fault"
            )
            lines.append(
                f"{each.verdict.outcome}: {each.request}, {each.seen.began - start:.1f} to"
                f" {each.seen.ended - start:.1f} s, {during}: {each.verdict.reason}"
            )
    return lines
