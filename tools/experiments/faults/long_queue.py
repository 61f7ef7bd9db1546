"""Counts the requests that are lost when a service ends while the queue is longer than every timer of the code.

A stack with one slot has 70 requests, half of them over HTTP, one of which runs. Then the detokenizer is killed; or all
services but the executor are terminated at once, while the executor is cut off from the broker for a minute, so that no
executor is ready. Each request must end with the text of an undisturbed run; none may be refused.
"""

import argparse
import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pagewire.bench._chaos.checks import EXACT, FAILURES, Seen
from pagewire.bench._chaos.faults import arena
from pagewire.bench._chaos.figures import Ended
from pagewire.bench._chaos.requests import Request, mixture
from pagewire.bench._chaos.schedule import CUT, KILL, TERMINATE, Fault
from pagewire.bench._chaos.trial import answers, disturb
from pagewire.bench._common.output import add_output, markdown, write
from pagewire.embedded.programs import GATEWAY, PIPELINE
from pagewire.shared.settings.config import Settings
from pagewire.shared.telemetry import logs

WITHOUT_EXECUTOR = 60.0
"""Seconds without an executor."""
CASES: Mapping[str, Sequence[Fault]] = {
    KILL: [Fault(f"{KILL}:detokenizer")],
    TERMINATE: [
        Fault(f"{CUT}:executor", seconds=WITHOUT_EXECUTOR),
        *(Fault(f"{TERMINATE}:{service}") for service in (*PIPELINE, GATEWAY) if service != "executor"),
    ],
}
"""The faults that happen at once, by the name of the case."""
SHAPES = ("greedy", "sampled", "stop", "slow", "whole", "logprobs", "grammar")
"""Shapes of requests that need one slot, and that no client cancels."""
EACH = 5
"""Requests of each shape over each transport: 70 in all."""
DEADLINE = 600.0
"""Seconds that a request has."""
LOOK_INTERVAL = 0.1
"""Seconds between two checks of the store."""


@dataclass
class Outcome:
    """Results of a case, over all rounds."""

    case: str
    rounds: int = 0
    requests: int = 0
    exact: int = 0
    waits: list[float] = field(default_factory=list)
    """Longest time in seconds that a request of a round waited for its first text."""
    failures: list[str] = field(default_factory=list)
    """Descriptions of all requests that did not end exactly."""


def main(arguments: list[str]) -> int:
    """Prints a table; the exit code is 1 if a request was lost, duplicated, reordered, wrong or hung."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments long_queue", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="times that each case happens")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--tokens", type=int, default=600, help="tokens of an answer, at most")
    parser.add_argument("--device", default="sim:h100")
    parser.add_argument("--model", default="", help="default: the default model")
    add_output(parser)
    options = parser.parse_args(arguments)
    logs.configure(Settings(log_level="error"), service="bench")
    settings = Settings(
        model=options.model, device=options.device, max_num_seqs=1, seed=1, log_level="error", port=0, nats_port=0
    )
    outcomes = [Outcome(case) for case in options.cases]

    def save() -> None:
        """Writes what has been measured so far, since a round takes minutes."""
        write(options.output, parser.prog, arguments, runs=[asdict(outcome) for outcome in outcomes])

    asyncio.run(measure(settings, outcomes, options.rounds, options.tokens, save))
    print("\n".join(table([asdict(outcome) for outcome in outcomes])))
    for outcome in outcomes:
        print("\n".join(f"{outcome.case}: {text}" for text in outcome.failures))
    return int(any(outcome.failures for outcome in outcomes))


def table(outcomes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line per case, in Markdown."""
    lines = [
        f"{raw['case']} | {raw['rounds']} | {raw['requests']} | {raw['exact']} | {len(raw['failures'])}"
        f" | {statistics.median(raw['waits'] or [0.0]):.1f} | {max(raw['waits'] or [0.0]):.1f}"
        for raw in outcomes
    ]
    header = "case | rounds | requests | exact | not exact | longest wait for the first text s, median | longest"
    return markdown(header, lines)


async def measure(
    settings: Settings, outcomes: Sequence[Outcome], rounds: int, tokens: int, save: Callable[[], None]
) -> None:
    """Lets each case happen so often, with 70 new requests each time; calls `save` after each."""
    requests = [request for request in mixture(0, tokens, EACH) if request.shape in SHAPES]
    async with arena(settings) as stack:

        async def begun(requests: Sequence[Request], seen: Sequence[Seen]) -> None:
            """Waits until all requests are stored and the first one runs."""
            while not any(its.begun for its in seen) or (  # noqa: ASYNC110 - many things end it
                await stack.unfinished() + sum(bool(its.ended) for its in seen) < len(requests)
            ):
                await asyncio.sleep(LOOK_INTERVAL)

        expected = await answers(stack.address, requests, DEADLINE)
        for _ in range(rounds):
            for outcome in outcomes:
                note(outcome, await disturb(stack, requests, expected, CASES[outcome.case], begun, DEADLINE))
                print(f"{outcome.case}: {outcome.exact} of {outcome.requests} exact", flush=True)
                save()


def note(outcome: Outcome, ended: Sequence[Ended]) -> None:
    """Adds a round to what became of the requests."""
    outcome.rounds += 1
    outcome.requests += len(ended)
    outcome.exact += sum(each.verdict.outcome == EXACT for each in ended)
    outcome.waits.append(max(first_wait(each.seen) for each in ended))
    outcome.failures += [
        f"{each.verdict.outcome}: {each.request}: {each.verdict.reason}"
        for each in ended
        if each.verdict.outcome in FAILURES
    ]


def first_wait(seen: Seen) -> float:
    """Returns the seconds until a request had its first text; until its end if it is no stream."""
    return next((at for at in seen.progress[1:]), seen.ended) - seen.began
