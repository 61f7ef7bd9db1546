"""The whole pipeline generates the tokens that `transformers` generates, whatever the settings."""

import asyncio
from typing import Any

import pytest
import torch

from pagewire import SamplingParams
from pagewire.shared.messages.client import Result
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import checkpoint
from tests.support.greedy import Case, cases, long_pair
from tests.support.pairwise import pairwise
from tests.support.pipeline import Pipeline, running

pytestmark = pytest.mark.anyio

CONTEXT = 96
FAMILIES = ["llama", "llama-llama3", "llama-sharded", "mistral", "qwen2", "qwen3", "opt"]
WINDOWED = {"mistral"}
"""Families that give back so many blocks that a pool for one sequence is enough for two."""
KINDS = ["llama", "qwen3", "opt"]
"""One of each kind of attention; `services/executor/models/test_families.py` compares the logits of all families."""
AXES: dict[str, list[Any]] = {
    "family": FAMILIES,
    "window": [1, 2, 8],
    "budget": [16, 64, 2048],
    "block_size": [8, 16],
    "pool": ["ample", "tiny"],
    "prefix_cache": [True, False],
}


def settings_for(row: dict[str, Any], **changes: Any) -> Settings:
    size = row["block_size"]
    blocks = {"ample": 4096 // size, "tiny": CONTEXT // size + 2}[row["pool"]]
    values = {
        "model": str(checkpoint(row["family"])),
        "dtype": "float32",
        "max_model_len": CONTEXT,
        "max_num_seqs": 32,
        "max_num_batched_tokens": row["budget"],
        "block_size": size,
        "num_kv_blocks": blocks,
        "lease_window": row["window"],
        "prefix_cache": row["prefix_cache"],
        "log_level": "error",
    }
    return Settings(**values | changes)


async def generate(pipeline: Pipeline, expected: tuple[Case, ...], **sampling: Any) -> list[Result]:
    """All cases at once, half of them as streams."""

    async def one(i: int, case: Case) -> Result:
        params = SamplingParams(max_tokens=case.max_tokens, **sampling)
        if i % 2:
            return await pipeline.client.generate(case.prompt, params)
        stream = pipeline.client.stream(case.prompt, params)
        return await stream.result()

    return await asyncio.gather(*(one(i, case) for i, case in enumerate(expected)))


async def check_greedy(row: dict[str, Any], **changes: Any) -> None:
    expected = cases(row["family"])
    async with running(settings_for(row, **changes)) as pipeline:
        if row["pool"] == "tiny":
            await check_preemption(pipeline, row["family"])
        results = await generate(pipeline, expected, temperature=0.0)
        for case, result in zip(expected, results, strict=True):
            assert result.choices[0].token_ids == case.tokens
            assert result.choices[0].finish_reason == ("length" if len(case.tokens) == case.max_tokens else "stop")
        await pipeline.until_idle()
        if row["family"] not in WINDOWED:
            assert (pipeline.load("scheduler")["preemptions"] > 0) == (row["pool"] == "tiny")


async def check_preemption(pipeline: Pipeline, family: str) -> None:
    """Two prompts that begin together and cannot both end in a tiny pool."""
    pair = long_pair(family)
    sampling = SamplingParams(max_tokens=pair[0].max_tokens, temperature=0.0)
    result = await pipeline.client.generate([case.prompt for case in pair], sampling)
    assert [choice.token_ids for choice in result.choices] == [case.tokens for case in pair]
    await pipeline.until_idle()
    if family not in WINDOWED:
        assert pipeline.load("scheduler")["preemptions"] > 0


@pytest.mark.parametrize("row", pairwise(AXES | {"family": KINDS}), ids=lambda row: "-".join(map(str, row.values())))
async def test_greedy_equals_transformers(row: dict[str, Any]) -> None:
    await check_greedy(row)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("row", pairwise(AXES), ids=lambda row: "-".join(map(str, row.values())))
async def test_greedy_equals_transformers_on_a_gpu(row: dict[str, Any]) -> None:
    """In float32, whose products are IEEE's on this device."""
    await check_greedy(row, device="cuda")


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("window", AXES["window"])
@pytest.mark.parametrize("budget", AXES["budget"])
@pytest.mark.parametrize("block_size", AXES["block_size"])
@pytest.mark.parametrize("pool", AXES["pool"])
async def test_greedy_equals_transformers_everywhere(
    family: str, window: int, budget: int, block_size: int, pool: str
) -> None:
    row = {"family": family, "window": window, "budget": budget, "block_size": block_size, "pool": pool}
    await check_greedy(row | {"prefix_cache": True})


async def test_seeded_sampling_gives_the_same_tokens_under_all_settings() -> None:
    axes = AXES | {"family": ["llama"], "window": [1, 8], "budget": [16, 2048]}
    expected = cases("llama")[:12]
    runs: list[list[list[int]]] = []

    async def sample(row: dict[str, Any]) -> list[list[int]]:
        async with running(settings_for(row)) as pipeline:
            filters: list[dict[str, Any]] = [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05, "n": 2}]
            results = await asyncio.gather(
                *(
                    pipeline.client.generate(
                        case.prompt,
                        SamplingParams(max_tokens=case.max_tokens, seed=i, temperature=0.8, **filters[i % 4]),
                    )
                    for i, case in enumerate(expected)
                )
            )
            return [choice.token_ids for result in results for choice in result.choices]

    for row in pairwise(axes):
        runs.append(await sample(row))
    assert all(tokens == runs[0] for tokens in runs)
    assert len({tuple(tokens) for tokens in runs[0]}) > len(expected)
