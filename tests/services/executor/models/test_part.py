"""The parts of all ranks together compute what the whole model computes."""

import pytest
import torch

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.services.executor.devices.cpu.compiled_model import CompiledLM
from pagewire.services.executor.models.registry import build_model, load_model
from pagewire.services.executor.models.shard import Collectives, Shard, Units, take
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import read_config
from tests.support.checkpoints import CONFIGS, CONTEXT, VOCABULARY, checkpoint
from tests.support.ranks import greedy, load_rank, logits_of, on_ranks, without_collectives

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


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_parts_of_a_parameter_are_the_whole(name: str, size: int) -> None:
    """Each number is on one rank, on the ranks that share its KV head, or on all."""
    whole = build_model(read_config(checkpoint(name)))
    cuts = [whole.cut(Shard(rank, size), Units()) for rank in range(size)]
    parts = [dict(cut.build(without_collectives()).named_parameters()) for cut in cuts]
    for parameter, value in whole.named_parameters():
        count = torch.zeros(value.shape)
        for cut, part in zip(cuts, parts, strict=True):
            held = cut.held(parameter)
            indices = take(torch.arange(value.numel()).view(value.shape), held)
            if parameter in part:
                assert part[parameter].shape == indices.shape, parameter
                count.view(-1)[indices.flatten()] += 1
        if "qkv" in parameter or "k_norm" in parameter:
            assert count.min() >= 1, parameter
        elif any(cut.held(parameter) for cut in cuts) or any(parameter not in part for part in parts):
            assert (count == 1).all(), parameter
        else:
            assert (count == size).all(), parameter


def test_random_weights_of_a_rank_are_a_part_of_the_whole_models() -> None:
    folder = checkpoint("qwen2-moe")
    whole = build_model(read_config(folder))
    expected = dict(load_model(folder, read_config(folder), "float32", random=3).named_parameters())
    for rank in range(2):
        cut = whole.cut(Shard(rank, 2), Units())
        for name, value in load_rank(folder, Shard(rank, 2), without_collectives(), random=3).named_parameters():
            assert torch.equal(value, take(expected[name], cut.held(name))), name


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"4 attention heads, too few .*-size 5: set it to at most 4"):
        load_rank(checkpoint("llama"), Shard(0, 5), without_collectives())


def test_more_ranks_than_whole_experts_are_refused() -> None:
    model = build_model(read_config(checkpoint("mixtral")) | {"num_local_experts": 2})
    with pytest.raises(ConfigurationError, match=r"2 experts, too few .*-size 3: set it to at most 2"):
        model.cut(Shard(0, 3, by_expert=True), Units()).build(without_collectives())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("compiled", [False, True])
def test_ranks_with_whole_experts_compute_the_logits_of_the_whole_model(size: int, compiled: bool) -> None:
    folder, ids = checkpoint("qwen2-moe"), text(seed=1)
    expected = logits_of(load_model(folder, read_config(folder), "float32"), ids)
    kernels = CpuKernels(build.load(), 1)

    def compute(shard: Shard, collectives: Collectives) -> torch.Tensor:
        part = load_rank(folder, Shard(shard.rank, size, by_expert=True), collectives)
        assert part.get_parameter("model.layers.0.mlp.experts.down").shape[0] in (8 // size, 8 // size + 1)
        return logits_of(CompiledLM(part, kernels, CONTEXT) if compiled else part, ids)

    for logits in on_ranks(size, compute):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_compiled_layers_compute_a_part(name: str) -> None:
    folder, ids = checkpoint(name), text(seed=1)
    kernels = CpuKernels(build.load(), 1)
    expected = logits_of(load_model(folder, read_config(folder), "float32"), ids)

    def compute(shard: Shard, collectives: Collectives) -> torch.Tensor:
        return logits_of(CompiledLM(load_rank(folder, shard, collectives), kernels, CONTEXT), ids)

    for logits in on_ranks(3, compute):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
