"""The parts of all ranks together compute what the whole model computes."""

import pytest
import torch

from pagewire.services.executor.models.registry import load_model
from pagewire.services.executor.models.shard import Collectives, Shard
from pagewire.shared.models.model_folder import read_config
from tests.support.checkpoints import CONFIGS, VOCABULARY, checkpoint
from tests.support.ranks import greedy, load_rank, logits_of, on_ranks

LENGTH = 40


def text(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_compute_the_logits_of_the_whole_model(name: str, size: int) -> None:
    folder, ids = checkpoint(name), text(seed=1)
    whole = load_model(folder, read_config(folder), "float32")
    expected, tokens = logits_of(whole, ids), greedy(whole, ids[:20], 8)

    def compute(shard: Shard, collectives: Collectives) -> tuple[torch.Tensor, list[int]]:
        part = load_rank(folder, shard, collectives)
        return logits_of(part, ids), greedy(part, ids[:20], 8)

    for logits, generated in on_ranks(size, compute):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert generated == tokens
