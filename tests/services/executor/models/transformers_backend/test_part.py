"""Ranks compute models that `transformers` builds, or refuse them by name."""

from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from transformers import GraniteConfig

from pagewire.services.executor.models.registry import load_model
from pagewire.services.executor.models.shard import Collectives, Shard
from pagewire.services.executor.models.transformers_backend.loading import load_decoder
from pagewire.services.executor.models.transformers_backend.model import TransformersLM
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import read_config
from tests.families.gguf_files import write_tiny
from tests.families.sweep import architecture_of, save
from tests.families.tiny import tiny_config
from tests.support.ranks import greedy, load_rank, logits_of, on_ranks, without_collectives

FAMILIES = ("granite", "cohere", "phi", "starcoder2", "nemotron")


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_compute_the_logits_of_the_whole_model(family: str, size: int, tmp_path: Path) -> None:
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

    for logits, generated in on_ranks(size, compute):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert generated == tokens


def test_a_part_set_apart_waits_for_no_other_rank(tmp_path: Path) -> None:
    save(tiny_config("granite"), tmp_path)
    collectives = without_collectives()
    part = load_decoder(tmp_path, read_config(tmp_path), torch.float32, shard=Shard(0, 2), collectives=collectives)
    with part.apart():
        logits_of(part, [3, 4, 5])
    assert collectives.calls == 0
    logits_of(part, [3, 4, 5])
    assert collectives.calls == 2 * len(part.spec.layers)


@pytest.mark.parametrize("name", ["folder", "model.gguf"])
def test_a_part_keeps_no_memory_of_the_whole(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if path.suffix:
        write_tiny(path, "granite")
    else:
        save(tiny_config("granite"), path)
    part = load_rank(path, Shard(0, 2), without_collectives())
    assert isinstance(part, TransformersLM)
    for parameter in part.model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes


def refusal(family: str, size: int = 2, **changes: Any) -> str:
    """The reason for which a family is refused where there are no weights."""
    config = tiny_config(family).to_dict() | {"architectures": [architecture_of(family)]} | changes
    with pytest.raises(ConfigurationError) as raised:
        load_model(Path("/nowhere"), config, "float32", None, None, Shard(0, size), without_collectives())
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gpt_oss", "lacks the attention model.layers.0.self_attn"),
        ("deepseek_v3", "mlp.experts as moe_tp_experts"),
        ("glm4", "mlp.down_proj as rowwise_split_input"),
        ("codegen", "a projection qkv_proj"),
    ],
)
def test_other_families_are_refused_by_name(family: str, reason: str) -> None:
    refused = refusal(family)
    assert f"model_type {family} cannot be cut for 2 ranks, because its" in refused
    assert reason in refused


def test_features_chosen_by_those_of_all_ranks_are_refused() -> None:
    assert "4 attention heads" in refusal("gemma3n_text", size=5)
    sparse = [0.0, 0.9, 0.0, 0.0]
    refused = refusal("gemma3n_text", activation_sparsity_pattern=sparse)
    assert "model_type gemma3n_text cannot be cut for 2 ranks, because model.layers.1.mlp" in refused


def test_more_ranks_than_heads_are_refused() -> None:
    assert "4 attention heads, too few for tensor-parallel-size 5: set it to at most 4" in refusal("granite", size=5)


def test_a_plan_that_forgets_a_part_of_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = dict(GraniteConfig.base_model_tp_plan)
    del plan["layers.*.self_attn.k_proj"]
    monkeypatch.setattr(GraniteConfig, "base_model_tp_plan", plan)
    assert "does not say how model.layers.0.self_attn.k_proj.weight is cut" in refusal("granite")


def test_a_plan_that_forgets_a_part_of_the_feed_forward_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = dict(GraniteConfig.base_model_tp_plan)
    del plan["layers.*.mlp.up_proj"]
    monkeypatch.setattr(GraniteConfig, "base_model_tp_plan", plan)
    assert "because it does not compute with a part of its heads and features" in refusal("granite")
