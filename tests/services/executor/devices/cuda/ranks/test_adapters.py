"""Adapters on several GPUs give the tokens that they give on one rank of a CPU."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.services.executor.devices.cuda.ranks.several_gpus import opened
from tests.services.executor.devices.cuda.test_adapters import RANKS, folders, texts
from tests.services.executor.devices.cuda.twins import Host, compiled_device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks are processes without GPUs")


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("llama", 2), *(pytest.param(*case, marks=pytest.mark.full) for case in (("llama", 3), ("qwen3", 2)))],
)
def test_several_ranks_give_the_tokens_of_one_with_a_mix_of_adapters(name: str, ranks: int, tmp_path: Path) -> None:
    """Plain rows among them, and sequences that are preempted, which changes the slots of adapters."""
    adapters = folders(tmp_path, name)
    one = compiled_device(name)
    expected = Host(one, seed=1, preempt=0).run(texts(adapters, 4, 3))
    assert len({tuple(tokens) for tokens in expected}) == len(adapters)
    flags: dict[str, Any] = {"enable_lora": True, "max_loras": len(RANKS), "max_lora_rank": max(RANKS)}
    with closing(opened(name, ranks, one.capacity.num_blocks, **flags)) as ranked:
        assert Host(ranked, seed=2, preempt=0.15).run(texts(adapters, 4, 3)) == expected
