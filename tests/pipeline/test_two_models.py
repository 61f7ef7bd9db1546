"""Two stacks with different models on one broker: each request is served by its own model, whoever receives it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pagewire import SamplingParams
from pagewire.shared import subjects
from pagewire.shared.bus import Bus
from pagewire.shared.errors import ModelNotFound, Unavailable
from pagewire.shared.process.runtime import run_service
from pagewire.shared.settings.config import Settings
from tests.support.broker import connect_role
from tests.support.checkpoints import checkpoint
from tests.support.pipeline import SERVICES, Pipeline, running
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPTS = ["the little house", "once upon a time", "a fox and a hen"]


def settings(family: str) -> Settings:
    return Settings(
        model=str(checkpoint(family)),
        served_model_name=family,
        dtype="float32",
        max_model_len=96,
        num_kv_blocks=64,
        log_level="error",
    )


@asynccontextmanager
async def beside(pipeline: Pipeline, family: str) -> AsyncIterator[dict[str, "asyncio.Task[None]"]]:
    """Starts the services of another model on the broker of a pipeline."""
    buses: list[Bus] = []
    tasks: dict[str, asyncio.Task[None]] = {}
    try:
        for name, cls in SERVICES.items():
            buses.append(await connect_role(pipeline.brokers[0], name))
            service = run_service(name, cls, settings(family), buses[-1], subjects.new_instance())
            tasks[name] = asyncio.create_task(service)
        beats = pipeline.peers.alive
        await until(lambda: all(sum(beat.ready for beat in beats(name)) == 2 for name in SERVICES))
        yield tasks
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        for bus in buses:
            await bus.close()


async def texts(pipeline: Pipeline, family: str) -> list[str]:
    results = await asyncio.gather(*(pipeline.client.generate(p, GREEDY, model=family) for p in PROMPTS))
    return [result.choices[0].text for result in results]


async def test_each_request_is_served_by_its_own_model() -> None:
    async with running(settings("llama")) as pipeline:
        alone = await texts(pipeline, "llama")
        async with asyncio.timeout(PATIENCE), beside(pipeline, "qwen3") as services:
            served = {info.name for info in await pipeline.client.models()}
            assert served == {"llama", "qwen3"}
            both = [await asyncio.gather(texts(pipeline, "llama"), texts(pipeline, "qwen3")) for _ in range(8)]
            assert all(llama == alone and qwen3 == both[0][1] for llama, qwen3 in both)
            assert both[0][1] != alone, "the two models say different things"
            counted = [len(await pipeline.client.tokenize("a fox", model=name)) for name in ("llama", "qwen3")]
            assert all(counted)
            with pytest.raises(ModelNotFound, match=r"llama.*qwen3|qwen3.*llama"):
                await pipeline.client.generate("x", GREEDY, model="gpt2")

            services["tokenizer"].cancel()
            await until(lambda: len(pipeline.peers.alive("tokenizer")) == 1)
            with pytest.raises((ModelNotFound, Unavailable)):
                await pipeline.client.generate("x", GREEDY, model="qwen3")
            assert await texts(pipeline, "llama") == alone
