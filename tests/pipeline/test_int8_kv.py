"""A KV cache in int8 through the whole pipeline: how a sequence is scheduled changes none of its tokens."""

import asyncio
from typing import Any

import pytest

from pagewire import SamplingParams
from pagewire.shared.messages.client import Result
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import checkpoint
from tests.support.greedy import cases
from tests.support.pipeline import Pipeline, running

pytestmark = pytest.mark.anyio

CONTEXT = 96
MAX_TOKENS = 24
APART: dict[str, Any] = {"num_kv_blocks": 400, "max_num_batched_tokens": 2048, "prefix_cache": False}
"""Settings that leave prompts whole and have room for all."""
TOGETHER: dict[str, Any] = {"num_kv_blocks": 40, "max_num_batched_tokens": 16, "prefix_cache": True}
"""Settings that cut prompts and preempt sequences."""


def settings(family: str, changes: dict[str, Any]) -> Settings:
    values: dict[str, Any] = {
        "model": str(checkpoint(family)),
        "kv_cache_dtype": "int8",
        "max_model_len": CONTEXT,
        "block_size": 8,
        "log_level": "error",
    }
    return Settings(**values | changes)


async def generate(pipeline: Pipeline, prompt: list[int], **how: Any) -> Result:
    return await pipeline.client.generate(prompt, SamplingParams(max_tokens=MAX_TOKENS, **how))


def tokens(result: Result) -> list[list[int]]:
    return [choice.token_ids for choice in result.choices]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
async def test_tokens_do_not_depend_on_how_a_sequence_is_scheduled(family: str) -> None:
    prompts = [case.prompt for case in cases("llama") if len(case.prompt) + MAX_TOKENS <= CONTEXT][:12]
    greedy, beams = {"temperature": 0.0, "ignore_eos": True}, {"beam_width": 3, "n": 2}
    async with running(settings(family, APART)) as pipeline:
        alone = [tokens(await generate(pipeline, prompt, **greedy)) for prompt in prompts]
        searched = tokens(await generate(pipeline, prompts[0], **beams))
    async with running(settings(family, TOGETHER)) as pipeline:
        for _ in range(2):  # the second time prefixes are found in the cache
            together = await asyncio.gather(*(generate(pipeline, prompt, **greedy) for prompt in prompts))
            assert [tokens(result) for result in together] == alone
        assert sum(result.usage.cached_tokens for result in together) > 0
        assert tokens(await generate(pipeline, prompts[0], **beams)) == searched
        await pipeline.until_idle()
        assert pipeline.load("scheduler")["preemptions"] > 0
