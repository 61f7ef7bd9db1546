"""An executor or a scheduler dies in the middle of requests that a second model drafts for: all end as they would."""

import json

import pytest

from pagewire import AsyncClient, SamplingParams
from pagewire.bench._chaos.faults import arena
from pagewire.bench._chaos.figures import failures
from pagewire.bench._chaos.requests import NATS, mixture
from pagewire.bench._chaos.schedule import Fault
from pagewire.bench._chaos.trial import answers, disturb
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import checkpoint

pytestmark = [pytest.mark.full, pytest.mark.anyio]

FOLDER = str(checkpoint("llama"))
SETTINGS = Settings(
    model=FOLDER,
    dtype="float32",
    num_kv_blocks=400,
    seed=1,
    log_level="error",
    speculative_config=json.dumps({"method": "draft_model", "model": FOLDER}),
)
REQUESTS = [request for request in mixture(seed=1, tokens=160, rounds=1) if request.transport == NATS]
"""Few enough that drafts pay."""


async def test_a_death_loses_no_token_of_requests_that_a_model_drafts_for() -> None:
    async with arena(SETTINGS) as stack, AsyncClient(stack.address.nats) as client:
        expected = await answers(stack.address, REQUESTS)
        for victim in ("executor", "scheduler"):
            ended = await disturb(stack, REQUESTS, expected, [Fault(f"kill:{victim}")])
            assert not failures(ended, [], ended[0].seen.began), victim
        result = await client.generate("The market", SamplingParams(max_tokens=40, ignore_eos=True))
        assert result.metrics is not None
        assert result.metrics.speculative_decoding is not None, "the model has drafted"
