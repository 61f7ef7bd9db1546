"""Ranks compute models that `transformers` builds, or refuse them by name."""

from pathlib import Path
from threading import Lock

import pytest
import torch

from pagewire.services.executor.models.registry import load_model
from pagewire.services.executor.models.shard import Collectives, Shard
from pagewire.services.executor.models.transformers_backend.loading import load_decoder
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import read_config
from tests.families.sweep import save
from tests.families.tiny import tiny_config
from tests.support.ranks import greedy, logits_of, on_ranks, without_collectives

FAMILIES = ("granite", "cohere", "phi", "starcoder2", "nemotron")


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_compute_the_logits_of_the_whole_model(family: str, tmp_path: Path) -> None:
    save(tiny_config(family), tmp_path)
    config = read_config(tmp_path)
    whole = load_decoder(tmp_path, config, torch.float32)
    ids = torch.randint(3, whole.spec.vocab_size, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    expected, tokens = logits_of(whole, ids), greedy(whole, ids[:12], 6)
    loading = Lock()  # transformers parses Python, which CPython 3.11 cannot do in two threads at once

    def compute(shard: Shard, collectives: Collectives) -> tuple[torch.Tensor, list[int]]:
        with loading:
            part = load_decoder(tmp_path, config, torch.float32, shard=shard, collectives=collectives)
        return logits_of(part, ids), greedy(part, ids[:12], 6)

    for logits, generated in on_ranks(2, compute):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert generated == tokens


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_other_families_are_refused_by_name(family: str, tmp_path: Path) -> None:
    save(tiny_config(family), tmp_path)
    with pytest.raises(ConfigurationError, match=f"model_type {family} cannot be cut for 2 ranks"):
        load_model(tmp_path, read_config(tmp_path), "float32", None, None, Shard(0, 2), without_collectives())
