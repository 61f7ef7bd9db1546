"""Models with sliding windows through the whole pipeline: windows give back their blocks, and the tokens stay right."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pagewire import SamplingParams
from pagewire.shared.config import Settings
from tests.families.sweep import Case, cases, save_model
from tests.support.checkpoints import VOCABULARY
from tests.support.pipeline import running

pytestmark = pytest.mark.anyio

LAYERS = 6
"""Five with a window and one without, as in Gemma 3: six groups of one layer."""


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


def settings_for(folder: Path, **changes: Any) -> Settings:
    values: dict[str, Any] = {"model": str(folder), "dtype": "float32", "max_num_seqs": 8, "log_level": "error"}
    return Settings(**values | changes)


async def check(settings: Settings, wanted: list[Case]) -> dict[str, float]:
    """Sends all at once, and then again, to be found in the prefix cache; returns what the scheduler has counted."""
    sampling = SamplingParams(max_tokens=len(wanted[0].tokens), temperature=0.0, ignore_eos=True)
    async with running(settings) as pipeline:
        for _ in range(2):
            results = await asyncio.gather(*(pipeline.client.generate(case.prompt, sampling) for case in wanted))
            for case, result in zip(wanted, results, strict=True):
                assert result.choices[0].token_ids == case.tokens
        await pipeline.until_idle()
        return pipeline.load("scheduler")


async def test_a_pool_that_cannot_hold_all_positions_in_all_layers_holds_what_is_seen(tmp_path: Path) -> None:
    model = gemma(tmp_path, window=16, context=256)
    wanted = cases(model, (200, 150, 170, 170), 24)
    entries = 224 // 8
    settings = settings_for(
        tmp_path, max_model_len=224, block_size=8, max_num_batched_tokens=16, num_kv_blocks=entries * 4
    )
    assert settings.num_kv_blocks is not None
    assert settings.num_kv_blocks < entries * LAYERS, "all positions of one sequence would fit"
    counted = await check(settings, wanted)
    assert counted["preemptions"] == 0


async def test_preempted_sequences_are_computed_again(tmp_path: Path) -> None:
    model = gemma(tmp_path, window=16, context=256)
    wanted = cases(model, (9, 33, 33, 17, 20), 60)
    settings = settings_for(
        tmp_path, max_model_len=144, block_size=8, max_num_batched_tokens=16, lease_window=2, num_kv_blocks=64
    )
    counted = await check(settings, wanted)
    assert counted["preemptions"] > 0
