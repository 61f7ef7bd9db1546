"""More requests than a simulated device can serve: who is refused, who is served, and who expires."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pagewire.bench.shapes import write_folder
from pagewire.shared.errors import DeadlineExceeded, Overloaded
from pagewire.shared.settings.config import Settings
from tests.support.pipeline import Pipeline, running
from tests.support.waiting import PATIENCE, until

pytestmark = [pytest.mark.anyio, pytest.mark.alone]

SLOTS = 2
TOKENS = 20
"""Tokens of a request: half a second on the device."""


@pytest.fixture
def max_queue_wait() -> str | None:
    return None


@pytest.fixture
async def pipeline(tmp_path: Path, max_queue_wait: str | None) -> AsyncIterator[Pipeline]:
    write_folder("llama-3-8b", tmp_path)
    settings = Settings(
        model=str(tmp_path),
        device="sim:l40s",
        max_num_seqs=SLOTS,
        max_queue_wait=max_queue_wait,
        log_level="error",
    )
    async with running(settings) as pipeline:
        yield pipeline


async def serve(pipeline: Pipeline, tokens: int = TOKENS, priority: int = 0, timeout: float = PATIENCE) -> float:
    """Returns the seconds until the first token of a request that ends well."""
    sent, first = time.monotonic(), 0.0
    stream = pipeline.client.stream([5, 6, 7], max_tokens=tokens, ignore_eos=True, priority=priority, timeout=timeout)
    async for _ in stream:
        first = first or time.monotonic() - sent
    return first


async def test_a_request_that_expires_in_the_queue_ends_at_its_deadline(pipeline: Pipeline) -> None:
    async with asyncio.TaskGroup() as tasks:
        others = [tasks.create_task(serve(pipeline, tokens=2000)) for _ in range(SLOTS)]
        await until(lambda: pipeline.load("scheduler")["running"] == SLOTS)
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await serve(pipeline, timeout=1.0)
        assert time.monotonic() - began > 0.9
        assert pipeline.load("scheduler")["running"] == SLOTS
        for task in others:
            task.cancel()
    await pipeline.until_idle()


@pytest.mark.parametrize("max_queue_wait", ["2s"])
async def test_admitted_requests_start_in_time_and_urgent_ones_first(pipeline: Pipeline) -> None:
    waits: list[float] = []
    refused: list[int] = []

    async def send() -> None:
        try:
            waits.append(await serve(pipeline))
        except Overloaded as error:
            refused.append(error.retry_after_ms or 0)

    async with asyncio.TaskGroup() as tasks:
        urgent = None
        for number in range(160):  # five times as many as can be served
            tasks.create_task(send())
            await asyncio.sleep(0.05)
            if number == 120:
                urgent = tasks.create_task(serve(pipeline, priority=-1))
                with pytest.raises(Overloaded):
                    await serve(pipeline, priority=1)
    assert urgent is not None
    assert len(waits) > 15
    assert len(refused) > 60
    assert max(waits) < 15.0  # without a limit the last one would wait for half a minute
    assert await urgent < max(waits)
    assert all(500 < retry_after < 20_000 for retry_after in refused[len(refused) // 2 :])
    assert pipeline.load("tokenizer")["refused"] >= len(refused)
    async with asyncio.timeout(PATIENCE):
        await serve(pipeline, tokens=1)


async def test_without_a_limit_a_burst_is_served(pipeline: Pipeline) -> None:
    waits = await asyncio.gather(*(serve(pipeline, tokens=5) for _ in range(100)))
    assert len(waits) == 100
    assert max(waits) > 3.0
