"""A process is killed in the middle of streams and of a beam search: they end once, as they would have ended."""

import asyncio

import pytest

from pagewire import AsyncClient, SamplingParams
from pagewire.embedded.programs import PIPELINE
from pagewire.embedded.stack import Stack
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import checkpoint
from tests.support.processes import kill

pytestmark = [pytest.mark.full, pytest.mark.anyio]

TOKENS = 200
SAMPLING = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
BEAMS = SamplingParams(max_tokens=TOKENS, beam_width=4, n=2, ignore_eos=True)
PROMPTS = ["The morning train", "An old woman", "Two children", "How far is the sea?"]


async def stream(client: AsyncClient, prompt: str, victim: str = "") -> str:
    """The text of one stream; `victim` dies when a quarter of it is there."""
    text, tokens = "", 0
    async for delta in client.stream(prompt, SAMPLING):
        text += delta.text
        tokens += len(delta.token_ids)
        if victim and tokens > TOKENS // 4:
            kill(victim)
            victim = ""
    assert tokens == TOKENS
    return text


async def search(client: AsyncClient) -> list[str]:
    """The texts of a beam search."""
    return [choice.text for choice in (await client.generate(PROMPTS[0], BEAMS)).choices]


async def test_streams_survive_the_death_of_a_tokenizer_a_scheduler_and_an_executor() -> None:
    settings = Settings(
        model=str(checkpoint("llama")), dtype="float32", num_kv_blocks=160, nats_port=0, log_level="error"
    )
    async with Stack(settings, PIPELINE) as stack, AsyncClient((await stack.ready()).nats) as client:
        expected = await asyncio.gather(search(client), *(stream(client, prompt) for prompt in PROMPTS))
        for victim in ("tokenizer", "scheduler", "executor"):
            results = await asyncio.gather(
                search(client),
                *(stream(client, prompt, victim if i == 0 else "") for i, prompt in enumerate(PROMPTS)),
            )
            assert results == expected, victim
            await stack.ready()
