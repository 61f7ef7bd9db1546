"""A rank of an executor is killed or stopped in the middle of requests of every shape: all end once, as they would."""

import pytest

from pagewire.bench._chaos.faults import arena
from pagewire.bench._chaos.figures import failures
from pagewire.bench._chaos.requests import mixture
from pagewire.bench._chaos.schedule import Fault
from pagewire.bench._chaos.trial import answers, disturb
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import checkpoint

pytestmark = pytest.mark.anyio

RANKS = 3
FAULTS = [Fault("kill:rank"), Fault("stop:rank", seconds=0.5), Fault("stop:rank", replica=1, seconds=3.0)]
"""Killed, stopped for less than the silence after which a rank counts as lost, and for more."""


async def test_a_lost_rank_loses_no_request() -> None:
    settings = Settings(
        model=str(checkpoint("llama")),
        dtype="float32",
        num_kv_blocks=400,
        tensor_parallel_size=RANKS,
        seed=1,
        log_level="error",
        spec_type="suffix",
    )
    requests = mixture(seed=1, tokens=160, rounds=1)
    async with arena(settings) as stack:
        expected = await answers(stack.address, requests)
        for fault in FAULTS:
            ended = await disturb(stack, requests, expected, [fault])
            assert not failures(ended, [], ended[0].seen.began), fault
