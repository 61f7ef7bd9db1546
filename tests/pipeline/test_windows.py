"""Models with sliding windows through the whole pipeline: windows give back their blocks, and the tokens stay right."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pagewire import SamplingParams
from pagewire.shared.settings.config import Settings
from tests.families.sweep import Case, cases, save_model
from tests.support.beam import transformers_beams
from tests.support.checkpoints import VOCABULARY
from tests.support.pipeline import running

pytestmark = pytest.mark.anyio

LAYERS = 6
"""Five with a window and one without, as in Gemma 3: six groups of one layer."""
WIDTH, BEAM_TOKENS = 3, 20
"""Parameters of a beam search whose forks cross the bounds of blocks."""


def gemma(folder: Path, window: int, context: int) -> PreTrainedModel:
    config = AutoConfig.for_model(
        "gemma3_text",
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=context,
        sliding_window=window,
        layer_types=["sliding_attention"] * (LAYERS - 1) + ["full_attention"],
        query_pre_attn_scalar=16,
        initializer_range=0.25,
        eos_token_id=0,
        bos_token_id=0,
        pad_token_id=None,
    )
    return save_model(AutoModelForCausalLM.from_config(config), folder)


def beams_behind(folder: Path, prompt: list[int]) -> list[list[int]]:
    return transformers_beams(folder, prompt, width=WIDTH, n=2, max_tokens=BEAM_TOKENS)


def settings_for(folder: Path, **changes: Any) -> Settings:
    values: dict[str, Any] = {"model": str(folder), "dtype": "float32", "max_num_seqs": 8, "log_level": "error"}
    return Settings(**values | changes)


async def check(settings: Settings, expected: list[Case], beams: list[list[int]]) -> dict[str, float]:
    """Sends all at once, and then again, to be found in the prefix cache; returns what the scheduler has counted.

    `beams` are the best texts of a search behind the first prompt.
    """
    sampling = SamplingParams(max_tokens=len(expected[0].tokens), temperature=0.0, ignore_eos=True)
    async with running(settings) as pipeline:
        for _ in range(2):
            results = await asyncio.gather(*(pipeline.client.generate(case.prompt, sampling) for case in expected))
            for case, result in zip(expected, results, strict=True):
                assert result.choices[0].token_ids == case.tokens
        search = SamplingParams(beam_width=WIDTH, n=len(beams), max_tokens=BEAM_TOKENS)
        best = await pipeline.client.generate(expected[0].prompt, search)
        assert [choice.token_ids for choice in best.choices] == beams
        await pipeline.until_idle()
        return pipeline.load("scheduler")


@pytest.mark.full
async def test_a_long_prompt_holds_its_windows(tmp_path: Path) -> None:
    """4,000 tokens, and windows of 512, in a pool for two thirds of what all positions take in all layers."""
    (case,) = cases(gemma(tmp_path, window=512, context=4608), (4000,), 160)
    settings = settings_for(tmp_path, max_model_len=4224, max_num_batched_tokens=512, num_kv_blocks=1000)
    sampling = SamplingParams(max_tokens=160, temperature=0.0, ignore_eos=True)
    async with running(settings) as pipeline:
        for cached in (0, 3984):
            result = await pipeline.client.generate(case.prompt, sampling)
            assert result.choices[0].token_ids == case.tokens
            assert result.usage.cached_tokens == cached


async def test_a_pool_too_small_for_all_positions_holds_the_windows(tmp_path: Path) -> None:
    model = gemma(tmp_path, window=16, context=256)
    expected = cases(model, (200, 150, 170, 170), 24)
    entries = 224 // 8
    settings = settings_for(
        tmp_path, max_model_len=224, block_size=8, max_num_batched_tokens=16, num_kv_blocks=entries * 5
    )
    assert settings.num_kv_blocks is not None
    assert settings.num_kv_blocks < entries * LAYERS, "all positions of one sequence would fit"
    counted = await check(settings, expected, beams_behind(tmp_path, expected[0].prompt))
    assert counted["preemptions"] == 0


async def test_preempted_sequences_are_computed_again(tmp_path: Path) -> None:
    model = gemma(tmp_path, window=16, context=256)
    expected = cases(model, (9, 33, 33, 17, 20), 60)
    settings = settings_for(
        tmp_path, max_model_len=144, block_size=8, max_num_batched_tokens=16, lease_window=2, num_kv_blocks=64
    )
    counted = await check(settings, expected, beams_behind(tmp_path, expected[0].prompt))
    assert counted["preemptions"] > 0
