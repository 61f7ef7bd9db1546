"""With FlashInfer's attention the device makes the tokens of the CPU device; a stand-in computes that attention."""

import sys
from types import ModuleType

import pytest
import torch

from pagewire.services.executor.devices.cuda.flashinfer_backend import FlashInferBackend
from tests.services.executor.devices.cuda import fake_flashinfer
from tests.services.executor.devices.cuda.test_device import texts
from tests.services.executor.devices.cuda.twins import Host, cpu_device, cuda_device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs FlashInfer itself")


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """FlashInfer, with float32 too."""
    found = fake_flashinfer.module(float32=True)
    monkeypatch.setitem(sys.modules, "flashinfer", found)
    return found


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_tokens_are_those_of_the_cpu(name: str, captured: bool) -> None:
    expected = Host(cpu_device(name), seed=1, preempt=0).run(texts(1, 4, 40, 6))
    device = cuda_device(name, captured=captured, backend=FlashInferBackend)
    assert Host(device, seed=2, preempt=0.15).run(texts(1, 4, 40, 6)) == expected
