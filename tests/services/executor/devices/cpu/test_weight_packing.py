"""Models whose matrices are packed as integers."""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.services.executor.devices.cpu.compiled_model import Embedding, Linear
from pagewire.services.executor.devices.cpu.weight_packing import CpuPacking
from pagewire.services.executor.models.quantized.gguf_blocks import unpack_integers
from pagewire.services.executor.models.quantized.layouts import IntegerWeights
from pagewire.services.executor.models.quantized.numbers import Scaled
from pagewire.services.executor.models.quantized.rounding import round_weights
from pagewire.services.executor.models.registry import build_model, load_model
from pagewire.services.executor.models.shard import Slices, Units
from pagewire.services.executor.models.tensors import TensorSource, open_tensors
from pagewire.services.executor.models.weights import load_weights
from pagewire.shared.models.gguf.reader import TensorType
from pagewire.shared.models.model_folder import read_config
from tests.support.checkpoints import checkpoint
from tests.support.device import Driver, Row
from tests.support.gguf_files import from_checkpoint, random_model

IDS = torch.randint(512, (60,), generator=torch.Generator().manual_seed(3)).tolist()
ROUNDED = 0.1
"""Maximum difference of logits, relative to their spread: what rows in eight bits may cost a tiny random model."""


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return CpuKernels(build.load(), 1)


def logits(path: Path, bits: int | None = None, *, packed: bool = False) -> Tensor:
    """Logits after the last of `IDS`."""
    driver = Driver(path, "float32", packed=packed, bits=bits)
    driver.add(0, len(IDS))
    driver.step(Row(0, 0, IDS))
    return driver.logits.clone()


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).pow(2).mean().sqrt() / expected.std())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_blocks_of_a_gguf_file_stay_packed(tmp_path: Path, architecture: str, kind: str) -> None:
    path = random_model(tmp_path / "model.gguf", architecture, kind)
    assert 0 < difference(logits(path, packed=True), logits(path)) < ROUNDED


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_scales_in_two_levels_give_the_bits_of_floats(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = random_model(tmp_path / "model.gguf", "llama", kind)
    packed = logits(path, packed=True)

    def in_floats(rows: npt.NDArray[np.uint8], stored: TensorType) -> IntegerWeights:
        weights = unpack_integers(rows, stored)
        assert weights is not None
        minima = None if weights.minima is None else weights.minima.float()
        return dataclasses.replace(weights, scales=weights.scales.float(), minima=minima)

    monkeypatch.setattr("pagewire.services.executor.models.gguf.tensors.unpack_integers", in_floats)
    assert torch.equal(logits(path, packed=True), packed)


@pytest.mark.parametrize(
    "name", ["llama", "llama-biased", "llama-tied", "qwen2", "opt", "opt-post-norm", "gpt2", "gpt-neox", "qwen2-moe"]
)
def test_eight_bits_are_nearly_the_plain_weights(name: str) -> None:
    assert 0 < difference(logits(checkpoint(name), 8), logits(checkpoint(name))) < ROUNDED


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "opt", "gpt2", "gpt-neox", "qwen2-moe", "mixtral"])
def test_four_bits_give_the_logits_of_the_rounded_weights(
    name: str, kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = logits(checkpoint(name), 4)
    plain = round_weights

    def exact(weight: Tensor, bits: int) -> IntegerWeights:
        """Equal numbers over the whole range of eight bits, whose products round the inputs in another way."""
        rounded = plain(weight, bits)
        scales = rounded.scales if isinstance(rounded.scales, Tensor) else rounded.scales.float()
        step = 1 << (8 - rounded.bits)
        codes, zero = step * rounded.codes, step * rounded.zero
        return dataclasses.replace(rounded, bits=8, codes=codes, zero=zero, scales=scales / step)

    monkeypatch.setattr("pagewire.services.executor.devices.cpu.weight_packing.round_weights", exact)
    assert difference(logits(checkpoint(name), 4), packed) < ROUNDED / 4


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_matrices_are_in_memory_once(name: str, kernels: CpuKernels) -> None:
    with capture_logs() as lines:
        model = load_model(checkpoint(name), read_config(checkpoint(name)), "bfloat16", CpuPacking(kernels, 8))
    assert {len(value.shape) for value in model.parameters()} == {1}
    assert model.embedding.is_meta
    assert model.embedding.dtype == torch.bfloat16
    modules = list(model.modules())
    assert sum(isinstance(module, Linear) for module in modules) == 2 * 4 + 1
    (table,) = (module.rows for module in modules if isinstance(module, Embedding))
    assert (table is model.lm_head.weights) == (name == "llama-tied")
    count = 2 * 7 + (1 if name == "llama-tied" else 2)
    assert [line["matrices"] for line in lines if line["event"] == "weights_packed"] == [{"int8": count}]


class Some(TensorSource):
    """A checkpoint some of whose tensors are stored as integers."""

    def __init__(self, source: TensorSource, stored: tuple[str, ...]) -> None:
        self._source, self._stored = source, stored

    def names(self) -> Collection[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read(self, targets: Mapping[str, Tensor]) -> None:
        for name, out in targets.items():
            if (matrix := self.integers(name)) is None:
                self._source.read({name: out})
            else:
                out.copy_(matrix.dequantize())

    def integers(self, name: str) -> IntegerWeights | None:
        if not name.endswith(self._stored):
            return None
        plain = torch.empty(self._source.shape(name))
        self._source.read({name: plain})
        return round_weights(plain, 8)

    def eight_bits(self, name: str) -> Scaled | None:
        return None

    def units(self, slices: Mapping[str, Slices]) -> Units:
        return self._source.units(slices)

    def cut(self, slices: Mapping[str, Slices]) -> TensorSource:
        return Some(self._source.cut(slices), self._stored)

    def uncut(self, name: str) -> tuple[TensorSource, Slices]:
        return self, {}


@pytest.mark.parametrize("stored", [("q_proj.weight", "up_proj.weight"), ("v_proj.weight", "o_proj.weight"), ()])
def test_integers_and_plain_weights_may_share_a_matrix(stored: tuple[str, ...], kernels: CpuKernels) -> None:
    folder = checkpoint("llama-biased")
    with open_tensors(folder) as source:
        some = Some(source, stored)
        model, plain = (build_model(read_config(folder)).eval() for _ in range(2))
        load_weights(model, some, torch.float32, CpuPacking(kernels, None))
        load_weights(plain, some, torch.float32)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    for part in ("self_attn.qkv", "mlp.up", "self_attn.o"):
        name = f"model.layers.1.{part}"
        inputs = x if part != "self_attn.o" else x.repeat(1, 2)
        result, expected = (one.get_submodule(name)(inputs) for one in (model, plain))
        assert difference(result, expected) < ROUNDED / 2
    packed = any(isinstance(module, Linear) for module in model.modules())
    assert packed == bool(stored)


def test_a_stored_head_that_differs_is_still_refused(tmp_path: Path, kernels: CpuKernels) -> None:
    path = from_checkpoint("llama", tmp_path / "model.gguf", "Q8_0")
    config = read_config(path) | {"tie_word_embeddings": True}
    with pytest.raises(Exception, match="unexpected tensors: output\\.weight"):
        load_model(path, config, "auto", CpuPacking(kernels, None))
