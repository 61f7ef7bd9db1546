"""A model that FlashInfer cannot compute is refused in one line that says what to set instead."""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.devices.cuda.attention.flashinfer_limits import check_model, find_flashinfer
from pagewire.services.executor.devices.cuda.open import check_backend
from pagewire.services.executor.models.model import ModelSpec
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import read_config
from pagewire.shared.settings.config import load
from tests.services.executor.devices.cuda.attention import fake_flashinfer
from tests.support.checkpoints import checkpoint

LAYER = Attention(8, 2, 128, 1.0, window=64, soft_cap=30.0)


def refusal(check: Callable[[], object]) -> str:
    with pytest.raises(ConfigurationError) as raised:
        check()
    assert "\n" not in str(raised.value)
    assert "attention-backend flashinfer" in str(raised.value)
    return str(raised.value)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer.module())


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_that_it_computes_is_not_refused(size: int, dtype: torch.dtype) -> None:
    check_model(ModelSpec(90, (LAYER, replace(LAYER, head_size=size))), dtype)


def test_float32_is_refused() -> None:
    refused = refusal(lambda: check_model(ModelSpec(90, (LAYER,)), torch.float32))
    assert "dtype float32: set dtype to bfloat16 or float16" in refused


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (replace(LAYER, head_size=80), "heads of 80, only of 64, 128, 256: set it to triton"),
        (replace(LAYER, value_size=64), "keys of 128 and values of 64: set it to triton"),
        (replace(LAYER, window=0, chunk=32), "attention in chunks: set it to triton"),
    ],
)
def test_layers_that_it_does_not_compute_are_refused(layer: Attention, said: str) -> None:
    assert said in refusal(lambda: check_model(ModelSpec(90, (LAYER, layer)), torch.bfloat16))


@pytest.mark.usefixtures("installed")
def test_its_version_is_found() -> None:
    assert find_flashinfer() == fake_flashinfer.VERSION


def test_without_it_the_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert refusal(find_flashinfer).endswith("pip install flashinfer-python")


def test_an_old_version_is_refused_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("flashinfer")
    vars(old).update(__version__="0.2.0", BatchPrefillWithPagedKVCacheWrapper=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "flashinfer", old)
    assert "0.2.0 is too old" in refusal(find_flashinfer)


def settings(**given: Any) -> Any:
    return load({"device": "cuda", **{name.replace("_", "-"): value for name, value in given.items()}}, {})


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["flashinfer", "FLASHINFER"])
def test_a_model_is_refused_before_its_weights_are_read(name: str) -> None:
    config = read_config(checkpoint("llama"))
    refused = refusal(lambda: check_backend(settings(attention_backend=name, dtype="bfloat16"), config))
    assert "heads of 16" in refused
    check_backend(settings(attention_backend=name, dtype="bfloat16"), config | {"head_dim": 64})


@pytest.mark.parametrize("name", ["triton", "TRITON_ATTN"])
def test_the_other_backend_needs_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    check_backend(settings(attention_backend=name, batch_invariant=True), {})


@pytest.mark.usefixtures("installed")
def test_batch_invariance_is_refused() -> None:
    invariant = settings(attention_backend="flashinfer", batch_invariant=True)
    assert "does not support batch-invariant: set it to triton" in refusal(lambda: check_backend(invariant, {}))
