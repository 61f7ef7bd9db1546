"""The memory that a GPU has for the KV pool."""

from dataclasses import replace

import pytest
import torch

from pagewire.services.executor.devices.cuda.kv_pool import KVPool
from pagewire.services.executor.devices.cuda.part import GRAPHS, CudaPart
from pagewire.services.executor.devices.ranks.startup import Measured
from pagewire.services.executor.models.registry import load_model
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import read_config
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import CONTEXT, checkpoint
from tests.support.host_runtime import HostRuntime

FREE, TOTAL = 10 << 30, 16 << 30


def part_of(name: str) -> CudaPart:
    model = load_model(checkpoint(name), read_config(checkpoint(name)), "float32")
    settings = Settings(model=name, gpu_memory_utilization=0.75)
    return CudaPart(settings, HostRuntime(), model, CONTEXT, torch.float32, torch.float32, adapters=None)


def test_a_model_that_drafts_leaves_less_and_shares_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    padded: list[CudaPart] = []

    def run_padding(part: CudaPart) -> None:
        padded.append(part)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (FREE, TOTAL))
    monkeypatch.setattr(CudaPart, "_run_padding", run_padding)
    alone, small = part_of("llama"), part_of("gemma3")
    both = replace(alone, draft=small)
    one, two = alone.measure(), both.measure()
    assert padded == [alone, both, small], "the largest steps of both must fit"
    own, other = (
        KVPool.bytes_per_block(part.model.spec, part.settings.block_size, torch.float32) for part in (alone, small)
    )
    assert one.block_bytes == own
    assert two.block_bytes == own + other * len(small.model.spec.groups.windows), "which has a block for each window"
    assert one.room == FREE - TOTAL // 4 - GRAPHS - one.block_bytes
    assert two.room == FREE - TOTAL // 4 - 2 * GRAPHS - two.block_bytes


def test_the_set_size_of_the_pool_is_that_of_all_ranks_and_of_one_model_that_drafts() -> None:
    memory = 1 << 30
    settings = Settings(model="llama", kv_cache_memory=memory)
    other = replace(part_of("llama"), settings=settings)
    first = replace(other, draft=part_of("gemma3"))
    own, both = other.block_bytes, first.block_bytes
    ranks = [Measured(FREE, FREE, both), *[Measured(FREE, FREE, own)] * 2]
    assert first.capacity(ranks).num_blocks == memory // (3 * own + both - own)
    with pytest.raises(ConfigurationError, match="are free"):
        first.capacity([*ranks[:2], Measured(0, memory // 8, own)])


def test_the_pool_is_as_large_as_the_rank_with_the_least_memory_holds() -> None:
    other = part_of("llama")
    first = replace(other, draft=part_of("gemma3"))
    own, both = other.block_bytes, first.block_bytes
    least = 200
    assert first.capacity([Measured(FREE, FREE, both), Measured(least * own, FREE, own)]).num_blocks == least
    assert first.capacity([Measured(least * both, FREE, both), Measured(FREE, FREE, own)]).num_blocks == least
