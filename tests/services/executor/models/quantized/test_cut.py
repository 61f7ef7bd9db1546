"""Quantized checkpoints are cut on their groups."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.services.executor.devices.cpu.compiled_model import CompiledLM
from pagewire.services.executor.devices.cpu.weight_packing import CpuPacking
from pagewire.services.executor.models.part import find_cut
from pagewire.services.executor.models.quantized.formats import read_quantization
from pagewire.services.executor.models.quantized.rounding import round_weights
from pagewire.services.executor.models.registry import build_model, load_model
from pagewire.services.executor.models.shard import Collectives, Shard, take
from pagewire.services.executor.models.tensors import open_tensors
from pagewire.services.executor.models.weights import places_of
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import read_config
from tests.services.executor.models.quantized.test_formats import METHODS
from tests.support.checkpoints import CONTEXT, VOCABULARY, checkpoint
from tests.support.gguf_files import random_model
from tests.support.quantized import write
from tests.support.ranks import load_rank, logits_of, on_ranks, without_collectives

WIDE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
"""Sizes of a model with whole groups for three ranks."""
COARSE = "fp8 blocks"
"""The method whose blocks have more rows than a head."""
ROUNDED = 5e-3
"""Relative difference of logits that kernels which round activations make of one in the last bits of float32."""
IDS = torch.randint(VOCABULARY, (24,), generator=torch.Generator().manual_seed(2)).tolist()


def wide(folder: Path) -> Path:
    """A plain checkpoint of the sizes `WIDE`."""
    shutil.copytree(checkpoint("llama"), folder)
    config = read_config(folder) | WIDE
    (folder / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randn(place.stored.shape, generator=random) * place.stored.shape[-1] ** -0.5
        for name, place in places_of(build_model(config))
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def check_parts(folder: Path, size: int, *, by_expert: bool = False) -> None:
    """Each rank's parameters are its part of the whole model's."""
    config = read_config(folder)
    expected = dict(load_model(folder, config, "float32").named_parameters())
    whole = build_model(config)
    for rank in range(size):
        shard = Shard(rank, size, by_expert)
        with open_tensors(folder, read_quantization(folder, config), dict(places_of(whole)).keys()) as source:
            cut = find_cut(whole, source, None, shard)
        part = load_rank(folder, shard, without_collectives())
        for name, value in part.named_parameters():
            assert torch.equal(value, take(expected[name], cut.held(name))), (rank, name)


def check_logits(folder: Path, size: int, bits: int | None = None) -> None:
    """The ranks, whose weights are integers, compute the logits of one rank, but for the rounding of activations."""
    kernels = CpuKernels(build.load(), 1)
    packing = CpuPacking(kernels, bits)
    whole = CompiledLM(load_model(folder, read_config(folder), "float32", packing), kernels, CONTEXT)
    expected = logits_of(whole, IDS)

    def compute(shard: Shard, collectives: Collectives) -> torch.Tensor:
        return logits_of(CompiledLM(load_rank(folder, shard, collectives, packing), kernels, CONTEXT), IDS)

    for logits in on_ranks(size, compute):
        assert (logits - expected).pow(2).mean().sqrt() < ROUNDED * expected.std()


@pytest.mark.parametrize("name", METHODS.keys() - {COARSE})
def test_a_rank_has_its_part_of_quantized_weights(name: str, tmp_path: Path) -> None:
    folder = write(wide(tmp_path / "source"), tmp_path, METHODS[name]())
    for size in (2, 3):
        check_parts(folder, size)


@pytest.mark.parametrize("name", ["gptq", "awq", "packed int4", "int8 channel"])
def test_a_rank_has_whole_experts_of_a_quantized_mixture(name: str, tmp_path: Path) -> None:
    check_parts(write(checkpoint("olmoe"), tmp_path, METHODS[name]()), 2, by_expert=True)


@pytest.mark.parametrize("name", ["gptq asymmetric", "gptq desc_act", "awq", "packed int4", "int8 channel"])
def test_ranks_compute_with_integers_as_one_does(name: str, tmp_path: Path) -> None:
    check_logits(write(wide(tmp_path / "source"), tmp_path, METHODS[name]()), 3)


@pytest.mark.parametrize("bits", [8, 4])
def test_ranks_round_weights_as_one_does(bits: int, tmp_path: Path) -> None:
    check_logits(wide(tmp_path / "source"), 3, bits)


@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ2_XS"])
def test_a_rank_has_its_part_of_a_gguf_file(kind: str, tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model.gguf", "llama", kind, width=512)
    check_parts(folder, 2)
    check_logits(folder, 2)


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "phi3", "mixtral"])
def test_ranks_round_other_layouts_as_one_does(name: str) -> None:
    check_logits(checkpoint(name), 2, bits=8)


def test_a_cut_inside_of_a_block_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    folder = write(wide(tmp_path / "source"), tmp_path, METHODS[COARSE]())
    with pytest.raises(ConfigurationError, match=r"8 attention heads, cut in units of 8, .* set it to at most 1"):
        load_rank(folder, Shard(0, 2), without_collectives())


@pytest.mark.parametrize("inputs", [range(512), range(96, 512), range(32, 544), range(2048)])
@pytest.mark.parametrize("bits", [8, 4])
def test_columns_of_rounded_weights_are_columns_of_the_numbers(bits: int, inputs: range) -> None:
    weights = round_weights(torch.randn(3, 2048, generator=torch.Generator().manual_seed(1)), bits)
    part = weights.columns(inputs)
    assert torch.equal(part.dequantize(), weights.dequantize()[:, inputs.start : inputs.stop])
