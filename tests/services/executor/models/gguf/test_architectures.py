"""Files of some architectures, of every way in which llama.cpp's converter changes tensors, give transformers' tokens.

`python -m tests.families --gguf` does the same with all architectures.
"""

from pathlib import Path

import pytest
import torch
import transformers
from gguf import MODEL_ARCH_NAMES

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.services.executor.devices.cpu.compiled_model import PackedExperts
from pagewire.services.executor.devices.cpu.weight_packing import CpuPacking
from pagewire.services.executor.models.gguf.tensors import open_gguf
from pagewire.services.executor.models.registry import load_model
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.gguf.architectures import ARCHITECTURES, reason
from pagewire.shared.models.model_folder import read_config
from tests.families.gguf_files import TINY, write_tiny
from tests.families.gguf_sweep import LENGTHS, TOKENS, equal_tokens
from tests.support.gguf_files import from_checkpoint

SOME = (
    "llama",  # rows of heads in another order, divisors of frequencies
    "gemma3",  # norms without a one, windows, two rotations
    "gemma3n",  # layers with the keys and values of other layers
    "gpt2",  # transposed matrices
    "gptneox",  # queries, keys and values by head
    "phi3",  # packed projections
    "qwen3moe",  # experts as one tensor
    "granitemoe",  # gates and values of experts as one matrix
    "deepseek2",  # latent attention, stored per head
    "gpt-oss",  # gates and values in turn, sinks, biases of experts
    "stablelm",  # norms of each head
)


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()


@pytest.mark.parametrize("architecture", SOME)
def test_tokens_equal_transformers(tmp_path: Path, architecture: str) -> None:
    assert equal_tokens(tmp_path / "model.gguf", architecture) == len(LENGTHS) * TOKENS


def test_packed_experts_are_the_numbers_that_are_read(tmp_path: Path) -> None:
    """A file has all experts of a layer as one tensor."""
    path = tmp_path / "model.gguf"
    write_tiny(path, "qwen3moe", "Q4_0")
    names = [f"model.layers.1.mlp.experts.{i}.{part}_proj.weight" for i in range(4) for part in ("gate", "up", "down")]
    with open_gguf(path, names) as source:
        whole = {name: torch.empty(source.shape(name)) for name in names}
        source.read(whole)
        for name, values in whole.items():
            integers = source.integers(name)
            assert integers is not None
            assert torch.equal(integers.dequantize(), values)
    assert len({float(values.sum()) for values in whole.values()}) == len(names)
    packing = CpuPacking(CpuKernels(build.load(), 1), None)
    mlp = load_model(path, read_config(path), "float32", packing).get_submodule("model.layers.1.mlp")
    assert isinstance(mlp.get_submodule("experts"), PackedExperts)


def test_every_architecture_is_compared_or_refused() -> None:
    assert ARCHITECTURES.keys() == TINY.keys()
    assert ARCHITECTURES.keys() <= set(MODEL_ARCH_NAMES.values())
    assert all(reason(name) for name in MODEL_ARCH_NAMES.values())


def test_a_tensor_that_the_family_has_no_use_for_is_refused(tmp_path: Path) -> None:
    """It would have changed the model's logits: here the output projection gets a bias."""
    path = tmp_path / "model.gguf"
    write_tiny(path, "granite", extra="blk.0.attn_output.bias")
    with pytest.raises(ConfigurationError, match=r"no use for: blk\.0\.attn_output\.bias"):
        load_model(path, read_config(path) | {"attention_bias": False}, "float32")


def test_an_unknown_architecture_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = from_checkpoint("llama", tmp_path / "m.gguf", metadata={"general.architecture": "mamba"})
    with pytest.raises(ConfigurationError, match=r"mamba, which .* other state .*\. These are: .*llama"):
        read_config(path)
