"""Each kind of fault once, in the middle of requests of every shape: all end once, as they would have ended."""

from itertools import combinations

import pytest

from pagewire.bench._chaos.faults import arena
from pagewire.bench._chaos.figures import failures
from pagewire.bench._chaos.requests import mixture
from pagewire.bench._chaos.schedule import CUT, FULL, KILL, KINDS, STOP, Fault
from pagewire.bench._chaos.trial import answers, disturb
from pagewire.embedded.stack import BROKER, GATEWAY, PIPELINE
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import checkpoint

pytestmark = pytest.mark.anyio

SETTINGS = Settings(model=str(checkpoint("llama")), dtype="float32", num_kv_blocks=400, seed=1, log_level="error")
TOKENS = 160
LASTS = {STOP: 0.7, CUT: 0.7, FULL: 0.5}
"""Seconds by action: less than the silence after which a service counts as gone."""
BEYOND_SILENCE = 3.0


def fault(kind: str) -> Fault:
    return Fault(kind, seconds=LASTS.get(kind.partition(":")[0], 0.0))


async def check(*trials: list[Fault], settings: Settings = SETTINGS) -> None:
    """Runs one stack through trials, one after the other."""
    requests = mixture(seed=1, tokens=TOKENS, rounds=1)
    async with arena(settings) as stack:
        wanted = await answers(stack.address, requests)
        for faults in trials:
            ended = await disturb(stack, requests, wanted, faults)
            assert not failures(ended, [], ended[0].seen.began), [each.kind for each in faults]


@pytest.mark.parametrize("action", ["kill", "stop", "term", "cut", "full"])
async def test_nothing_is_lost_by_one_fault(action: str) -> None:
    await check(*([fault(kind)] for kind in KINDS if kind.startswith(f"{action}:")))


@pytest.mark.full
@pytest.mark.parametrize("action", [STOP, CUT])
async def test_nothing_is_lost_when_a_service_counts_as_gone_and_returns(action: str) -> None:
    kinds = (kind for kind in KINDS if kind.startswith(f"{action}:"))
    await check(*([Fault(kind, seconds=BEYOND_SILENCE)] for kind in kinds))


@pytest.mark.full
@pytest.mark.parametrize("pair", [*combinations((*PIPELINE, GATEWAY, BROKER), 2)], ids="-".join)
async def test_nothing_is_lost_when_two_die_at_once(pair: tuple[str, str]) -> None:
    await check([fault(f"{KILL}:{service}") for service in pair])
