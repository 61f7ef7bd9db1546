"""A request that makes every step raise ends with an error; all others end as if it had not been there."""

import asyncio
import time
from pathlib import Path

import pytest

from pagewire import AsyncClient, SamplingParams
from pagewire.services.executor.devices import open_device
from pagewire.services.executor.steps import step_thread
from pagewire.shared.errors import Internal
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import checkpoint
from tests.support.pipeline import running
from tests.support.poison import PoisonedDevice

pytestmark = [pytest.mark.alone, pytest.mark.anyio]

TOKENS = 120
PROMPTS = [[5 + i] * (4 + 3 * i) for i in range(6)]
POISON = 3
LONGEST_PAUSE = 10.0
"""Seconds that other streams may stand still, on the slowest machine."""
SAMPLING = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)


async def stream(client: AsyncClient, prompt: list[int], begun: asyncio.Event | None = None) -> tuple[list[int], float]:
    """The tokens of one stream, and the longest pause between two of its frames in seconds."""
    tokens: list[int] = []
    pause, last = 0.0, time.monotonic()
    async for delta in client.stream(prompt, SAMPLING):
        now = time.monotonic()
        pause, last = (max(pause, now - last) if tokens else 0.0), now
        tokens += delta.token_ids
        if begun is not None and len(tokens) > TOKENS // 8:
            begun.set()
    return tokens, pause


async def test_only_the_poisonous_request_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[PoisonedDevice] = []

    def open_poisoned(settings: Settings, folder: Path) -> PoisonedDevice:
        devices.append(PoisonedDevice(open_device(settings, folder), POISON))
        return devices[-1]

    monkeypatch.setattr(step_thread, "open_device", open_poisoned)
    settings = Settings(model=str(checkpoint("llama")), dtype="float32", num_kv_blocks=160, log_level="error")
    async with running(settings) as pipeline:
        client = pipeline.client
        expected = [(await stream(client, prompt))[0] for prompt in PROMPTS]
        assert not devices[0].poisoned_steps, "the model itself picks the marked token: mark another"

        begun = asyncio.Event()
        streams = [asyncio.create_task(stream(client, prompt, begun)) for prompt in PROMPTS]
        await begun.wait()
        with pytest.raises(Internal, match="runs alone"):
            await client.generate([7, 7, POISON, 7], SAMPLING)
        results = await asyncio.gather(*streams)
        assert [tokens for tokens, _ in results] == expected
        assert max(pause for _, pause in results) < LONGEST_PAUSE
        assert devices[0].poisoned_steps[0] > 1, "it did not fail in company"
        assert devices[0].poisoned_steps[1:] == [1], "it was not tried alone, once"
        await pipeline.until_idle()
