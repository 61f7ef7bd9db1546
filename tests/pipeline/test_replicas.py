"""Two replicas on one queue: both work, and requests go on at the other one when half of a pair is killed."""

import asyncio

import pytest

from pagewire import AsyncClient
from pagewire.embedded.programs import PIPELINE
from pagewire.embedded.stack import Stack
from pagewire.shared.bus import nats
from pagewire.shared.process.discovery import ask
from pagewire.shared.settings.config import Settings
from tests.pipeline.test_kill import PROMPTS, stream
from tests.support.checkpoints import checkpoint

pytestmark = [pytest.mark.anyio]


async def sampled_by_replicas(url: str) -> list[float]:
    """Returns how many tokens each executor has sampled."""
    bus = await nats.connect(url, name="test", inbox_prefix="_INBOX")
    try:
        return [float(stats.metadata["load.sampled"]) for stats in await ask(bus, "executor")]
    finally:
        await bus.close()


async def test_streams_of_two_replicas_survive_a_dead_scheduler_and_executor() -> None:
    settings = Settings(
        model=str(checkpoint("llama")),
        dtype="float32",
        num_kv_blocks=100,
        max_num_seqs=2,
        data_parallel_size=2,
        nats_port=0,
        log_level="error",
    )
    async with Stack(settings, PIPELINE) as stack, AsyncClient((await stack.ready()).nats) as client:
        expected = await asyncio.gather(*(stream(client, prompt) for prompt in PROMPTS))
        url = (await stack.ready()).nats
        while sum(tokens > 0 for tokens in await sampled_by_replicas(url)) < 2:  # one may take all of a short burst
            assert await asyncio.gather(*(stream(client, prompt) for prompt in PROMPTS)) == expected
        for victim in ("scheduler", "executor"):
            texts = await asyncio.gather(
                *(stream(client, prompt, victim if i == 0 else "") for i, prompt in enumerate(PROMPTS))
            )
            assert texts == expected, victim
            await stack.ready()
