"""Two replicas on one queue: both work, and requests go on at the other one when half of a pair is killed."""

import asyncio

import pytest

from pagewire import AsyncClient
from pagewire.embedded.programs import PIPELINE
from pagewire.embedded.stack import Stack
from pagewire.shared.bus import nats
from pagewire.shared.process.discovery import Stats, ask
from pagewire.shared.settings.config import Settings
from tests.pipeline.test_kill import PROMPTS, stream
from tests.support.checkpoints import checkpoint

pytestmark = [pytest.mark.anyio]


async def executors(url: str) -> list[Stats]:
    bus = await nats.connect(url, name="test", inbox_prefix="_INBOX")
    try:
        return await ask(bus, "executor")
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
        worked = [float(stats.metadata["load.sampled"]) for stats in await executors((await stack.ready()).nats)]
        assert len(worked) == 2
        assert all(worked), "one replica did everything"
        for victim in ("scheduler", "executor"):
            texts = await asyncio.gather(
                *(stream(client, prompt, victim if i == 0 else "") for i, prompt in enumerate(PROMPTS))
            )
            assert texts == expected, victim
            await stack.ready()
