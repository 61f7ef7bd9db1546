"""Each kind of fault once, in the middle of requests of every shape: all end once, as they would have ended."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import pytest

from pagewire.bench._chaos.checks import Seen
from pagewire.bench._chaos.faults import Arena, arena
from pagewire.bench._chaos.figures import failures
from pagewire.bench._chaos.other_version import newer_package
from pagewire.bench._chaos.requests import Request, mixture
from pagewire.bench._chaos.schedule import BUSY, CUT, FULL, JOIN, KILL, KINDS, SKEW, STARVE, STOP, Fault, possible
from pagewire.bench._chaos.trial import answers, disturb, streams_begun
from pagewire.embedded.programs import GATEWAY, PIPELINE
from pagewire.embedded.stack import BROKER
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import checkpoint

pytestmark = pytest.mark.anyio

SETTINGS = Settings(
    model=str(checkpoint("llama")),
    dtype="float32",
    num_kv_blocks=400,
    seed=1,
    log_level="error",
    spec_type="suffix",  # which must lose nothing either
)
TOKENS = 160
LASTS = {STOP: 0.7, CUT: 0.7, FULL: 0.5, STARVE: 3.0, BUSY: 3.0, JOIN: 3.0}
"""Seconds by action: for a service that does nothing, less than the silence after which it counts as gone."""
SELDOM = {
    *(f"{STARVE}:{service}" for service in (*PIPELINE, GATEWAY, BROKER) if service != "executor"),
    "busy:machine",
    "damage:broker",
    "join:version",
}
"""Kinds that only long runs try."""
BEYOND_SILENCE = 3.0


def fault(kind: str) -> Fault:
    return Fault(kind, seconds=LASTS.get(kind.partition(":")[0], 0.0))


@dataclass(frozen=True)
class Served:
    """A stack, and the answers to the requests that are sent to it in each trial."""

    stack: Arena
    requests: list[Request]
    answers: dict[int, Seen]

    async def check(self, *faults: Fault) -> None:
        """Lets faults happen at once, and expects of every request the end that it has without them."""
        ended = await disturb(self.stack, self.requests, self.answers, faults)
        assert not failures(ended, [], ended[0].seen.began), [fault.kind for fault in faults]


@pytest.fixture(scope="module")
async def served() -> AsyncIterator[Served]:
    """One stack for all faults: to start one takes as long as a trial."""
    requests = mixture(seed=1, tokens=TOKENS, rounds=1)
    with newer_package() as newer:
        async with arena(SETTINGS, newer=newer) as stack:
            yield Served(stack, requests, await answers(stack.address, requests))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.full] if kind in SELDOM else [])
        for kind in possible(KINDS, ranks=1)
        if not kind.startswith(SKEW)
    ],
)
async def test_one_fault_loses_no_request(served: Served, kind: str) -> None:
    await served.check(fault(kind))


async def test_a_scheduler_that_dies_after_a_purge_loses_nothing(served: Served) -> None:
    """It has stored again what it holds before the stack counts as ready for the next fault."""

    async def purged(requests: Sequence[Request], seen: Sequence[Seen]) -> None:
        await streams_begun(requests, seen)
        await served.stack.apply(fault("purge:store"))

    ended = await disturb(served.stack, served.requests, served.answers, [fault("kill:scheduler")], purged)
    assert not failures(ended, [], ended[0].seen.began)


@pytest.mark.full
@pytest.mark.parametrize("kind", [kind for kind in possible(KINDS, ranks=1) if kind.startswith((STOP, CUT))])
async def test_a_service_that_counts_as_gone_and_returns_loses_nothing(served: Served, kind: str) -> None:
    await served.check(Fault(kind, seconds=BEYOND_SILENCE))


@pytest.mark.full
@pytest.mark.parametrize("pair", [*combinations((*PIPELINE, GATEWAY, BROKER), 2)], ids="-".join)
async def test_two_services_that_die_at_once_lose_no_request(served: Served, pair: tuple[str, str]) -> None:
    await served.check(*(fault(f"{KILL}:{service}") for service in pair))
