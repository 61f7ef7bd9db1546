"""The broker is killed while requests are on their way into the work queue: all end as they would have ended."""

import asyncio
import os
import signal

import pytest

from pagewire import AsyncClient, SamplingParams
from pagewire.embedded.broker import Broker
from pagewire.embedded.programs import PIPELINE
from pagewire.embedded.stack import Stack
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import checkpoint
from tests.support.waiting import PATIENCE

pytestmark = [pytest.mark.anyio]

SAMPLING = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
PROMPTS = ["The morning train", "An old woman", "Two children", "How far is the sea?"]
DELAYS = (0.0, 0.015, 0.03, 0.06)
"""Seconds from the sending of the requests to the kill."""


async def read(client: AsyncClient, prompt: str) -> str:
    """The text of one stream."""
    return "".join([delta.text async for delta in client.stream(prompt, SAMPLING, model="llama")])


async def ask(client: AsyncClient) -> list[str]:
    """Asks for each text four times at once."""
    return await asyncio.gather(*(read(client, prompt) for prompt in PROMPTS * 4))


async def test_no_stream_is_left_without_work() -> None:
    async with Broker(port=0) as broker:
        settings = Settings(
            model=str(checkpoint("llama")),
            dtype="float32",
            num_kv_blocks=200,
            log_level="error",
            nats_url=broker.url,
            nats_user=broker.user,
            nats_password=broker.password,
        )
        async with Stack(settings, PIPELINE) as stack:
            await stack.ready()
            async with AsyncClient(broker.url) as client:
                expected = await ask(client)
                for delay in DELAYS:
                    asking = asyncio.create_task(ask(client))
                    await asyncio.sleep(delay)  # the moment is what is tested
                    os.kill(broker.pid, signal.SIGKILL)
                    await broker.wait()
                    await broker.start()
                    assert await asyncio.wait_for(asking, PATIENCE) == expected, delay
