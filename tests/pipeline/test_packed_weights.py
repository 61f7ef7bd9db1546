"""The default model with its weights as they are stored: a request's tokens are the same alone and beside others."""

import asyncio

import pytest

from pagewire import SamplingParams
from pagewire.shared.messages.client import Result
from pagewire.shared.settings.config import Settings
from tests.support.default_model import default_model
from tests.support.pipeline import Pipeline, running

pytestmark = pytest.mark.anyio

PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "One, two, three, four, five, six, seven, eight, nine,",
    "Once upon a time there was a fox who",
]


def settings() -> Settings:
    """So few tokens per step and blocks that prompts are cut, and that sequences together are preempted."""
    return Settings(
        model=str(default_model()),
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        block_size=8,
        num_kv_blocks=11,
        prefix_cache=False,
        log_level="error",
    )


async def generate(pipeline: Pipeline, prompt: str) -> Result:
    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    return await pipeline.client.generate(prompt, sampling, return_token_ids=True)


async def test_tokens_do_not_depend_on_the_batch() -> None:
    async with running(settings()) as pipeline:
        alone = [await generate(pipeline, prompt) for prompt in PROMPTS]
        together = await asyncio.gather(*(generate(pipeline, prompt) for prompt in PROMPTS))
    assert [one.choices[0].token_ids for one in together] == [one.choices[0].token_ids for one in alone]
    assert "Paris" in alone[0].choices[0].text
    assert " ten" in alone[2].choices[0].text
