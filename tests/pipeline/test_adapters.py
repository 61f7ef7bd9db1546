"""Adapters through the whole pipeline: each request gets the text of the model that it names, whatever else runs."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pagewire import SamplingParams
from pagewire.shared.errors import ModelNotFound
from pagewire.shared.messages.client import Result
from pagewire.shared.settings.config import Settings
from tests.support.adapters import TARGETS, logits_of, merged, write_adapter
from tests.support.checkpoints import VOCABULARY, checkpoint, reference_model
from tests.support.pipeline import Pipeline, running

pytestmark = pytest.mark.anyio

BASE = "llama"
RANKS = (4, 8, 12, 16, 24, 32, 48, 64)
TOKENS = 10
PREFIX = torch.randint(VOCABULARY, (24,), generator=torch.Generator().manual_seed(7)).tolist()


class Case(NamedTuple):
    """A prompt with the tokens that a merged model generates greedily."""

    model: str
    prompt: list[int]
    tokens: list[int]


def greedy(model: Any, prompt: Sequence[int]) -> tuple[list[int], float]:
    """The generated tokens, and the least distance between the best and the second best logit."""
    ids, gap = list(prompt), float("inf")
    for _ in range(TOKENS):
        best = logits_of(model, ids)[-1].topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return ids[len(prompt) :], gap


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of ranks 4 to 64."""
    root = tmp_path_factory.mktemp("adapters")
    return {f"r{r}": write_adapter(root / f"r{r}", checkpoint(BASE), rank=r, seed=r) for r in RANKS}


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Two prompts per adapter and of the base alone, which all begin alike."""
    chosen = []
    for rank in (0, *RANKS):
        model = reference_model(checkpoint(BASE))
        if rank:
            model = merged(checkpoint(BASE), TARGETS, partial(_rank_and_scale, rank), rank)
        for seed in range(2):
            tail = torch.randint(VOCABULARY, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
            tokens, gap = greedy(model, PREFIX + tail)
            if gap > 1e-3:
                chosen.append(Case(f"r{rank}" if rank else BASE, PREFIX + tail, tokens))
    assert len({case.model for case in chosen}) == len(RANKS) + 1
    return chosen


def _rank_and_scale(rank: int, _: str) -> tuple[int, float]:
    return rank, 8 / rank


def settings(folders: dict[str, Path], **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "model": str(checkpoint(BASE)),
        "served_model_name": BASE,
        "dtype": "float32",
        "max_model_len": 96,
        "num_kv_blocks": 128,
        "block_size": 8,
        "max_num_batched_tokens": 64,
        "enable_lora": True,
        "lora_modules": ",".join(f"{name}={path}" for name, path in folders.items()),
        "max_loras": 8,
        "max_lora_rank": 64,
        "log_level": "error",
    }
    return Settings(**values | changes)


async def generate(pipeline: Pipeline, cases: Sequence[Case]) -> list[Result]:
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    return await asyncio.gather(*(pipeline.client.generate(case.prompt, greedy, model=case.model) for case in cases))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_loras": 2, "max_num_batched_tokens": 16, "max_cpu_loras": 3},
        {"max_loras": 3, "num_kv_blocks": 14, "lease_window": 2},
        {"prefix_cache": False, "lease_window": 1},
        {"tensor_parallel_size": 3, "max_loras": 3, "max_cpu_loras": 3, "num_kv_blocks": 14},
    ],
    ids=["ample", "chunks", "preempted", "uncached", "ranks"],
)
async def test_a_mix_gets_the_tokens_of_each_merged_model(
    folders: dict[str, Path], cases: list[Case], changes: dict[str, Any]
) -> None:
    async with running(settings(folders, **changes)) as pipeline:
        for _ in range(2):  # the second time with what the first has left in the cache
            results = await generate(pipeline, cases)
            assert [r.choices[0].token_ids for r in results] == [case.tokens for case in cases]
        await pipeline.until_idle()


async def test_no_adapter_answers_from_the_cache_of_another(folders: dict[str, Path], cases: list[Case]) -> None:
    """Fails without the hash of the adapter in the salt."""
    prompts = [Case(name, cases[0].prompt, []) for name in (BASE, *folders)]
    async with running(settings(folders)) as pipeline:
        for case in prompts:
            (first,) = await generate(pipeline, [case])
            assert first.usage.cached_tokens == 0
            (again,) = await generate(pipeline, [case])
            assert again.usage.cached_tokens > 0
            assert again.choices[0].token_ids == first.choices[0].token_ids


async def test_models_lists_adapters_with_their_parent_and_content(folders: dict[str, Path]) -> None:
    async with running(settings(folders)) as pipeline:
        infos = {info.name: info for info in await pipeline.client.models()}
        assert infos.keys() == {BASE, *folders}
        assert infos[BASE].parent == ""
        assert {infos[name].parent for name in folders} == {BASE}
        assert len({info.root for info in infos.values()}) == len(infos)
        with pytest.raises(ModelNotFound, match="r8"):
            await pipeline.client.generate("x", model="r9")
        assert (await pipeline.client.generate("x", max_tokens=1)).usage.completion_tokens == 1  # the base
