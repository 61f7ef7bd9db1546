"""Many requests, some cancelled at random moments: each ends once, and nothing is left behind."""

import asyncio
import gc
import random
from collections import Counter

import psutil
import pytest

from pagewire import SamplingParams
from pagewire.shared.errors import PagewireError
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import VOCABULARY, checkpoint
from tests.support.pipeline import Pipeline, running

pytestmark = pytest.mark.anyio

SETTINGS = Settings(
    model=str(checkpoint("llama")),
    dtype="float32",
    max_model_len=96,
    max_num_seqs=24,
    max_num_batched_tokens=128,
    num_kv_blocks=48,
    block_size=8,
    log_level="error",
)


async def churn(pipeline: Pipeline, seed: int, requests: int = 500, cancelled: int = 50) -> Counter[str]:
    """One round; how the requests ended."""
    draw = random.Random(seed)
    doomed = set(draw.sample(range(requests), cancelled))
    ends: Counter[str] = Counter()
    room = asyncio.Semaphore(64)

    async def one(i: int) -> None:
        prompt = [draw.randrange(1, VOCABULARY) for _ in range(draw.randint(1, 40))]
        sampling = SamplingParams(
            max_tokens=draw.randint(1, 24),
            temperature=draw.choice([0.0, 1.0]),
            n=1,
            seed=i,
            stop=draw.choice([[], ["the"], ["e", "in"]]),
        )
        doom = draw.randint(0, 12) if i in doomed else None
        async with room:
            if i % 3 == 0 and doom is None:
                result = await pipeline.client.generate(prompt, sampling)
                ends[result.choices[0].finish_reason] += 1
                return
            stream = pipeline.client.stream(prompt, sampling)
            tokens = 0
            async for delta in stream:
                tokens += len(delta.token_ids)
                if doom is not None and tokens > doom:
                    await stream.cancel()
                    doom = None
            assert stream.final is not None
            assert stream.final.usage.completion_tokens == tokens
            ends[stream.final.choices[0].finish_reason] += 1

    await asyncio.gather(*(one(i) for i in range(requests)))
    await pipeline.until_idle()
    return ends


async def test_every_request_ends_once_and_all_blocks_and_slots_are_free() -> None:
    async with running(SETTINGS) as pipeline:
        ends = await churn(pipeline, seed=1)
        assert sum(ends.values()) == 500
        assert set(ends) == {"length", "stop", "cancelled"}
        assert pipeline.load("executor")["num_slots"] == 0


@pytest.mark.full
async def test_memory_is_flat_over_ten_rounds() -> None:
    process = psutil.Process()
    async with running(SETTINGS) as pipeline:
        resident = []
        for seed in range(10):
            await churn(pipeline, seed)
            gc.collect()
            resident.append(process.memory_info().rss)
        # The records of ended requests fill up in the first rounds: they are kept for a time, not for ever.
        assert resident[-1] < resident[3] * 1.05, [size >> 20 for size in resident]


async def test_a_client_that_leaves_its_stream_cancels_it() -> None:
    async with running(SETTINGS) as pipeline:
        async for _ in pipeline.client.stream([5, 6], SamplingParams(max_tokens=90, ignore_eos=True)):
            break
        await pipeline.until_idle()
        assert pipeline.load("executor")["sampled"] < 90
        with pytest.raises(PagewireError):
            await pipeline.client.generate("")
