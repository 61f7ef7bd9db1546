"""Behaviour that only a GPU can show: a loop that never waits for it, and a device opened through the settings."""

from typing import Any

import pytest
import torch

from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.devices import open_device
from pagewire.services.executor.devices.cuda.attention.flashinfer_backend import FlashInferBackend
from pagewire.services.executor.devices.cuda.attention.flashinfer_limits import HEAD_SIZES
from pagewire.services.executor.devices.cuda.attention.triton_backend import TritonBackend
from pagewire.services.executor.devices.cuda.runtime import CudaRuntime
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.settings.config import load
from tests.services.executor.devices.cuda.attention.one_layer import OneLayer, Rows
from tests.services.executor.devices.cuda.twins import GREEDY, batch_of, cuda_device
from tests.support.checkpoints import checkpoint


@pytest.mark.cuda
def test_no_launch_synchronises() -> None:
    device = cuda_device("llama")
    device.add(0, [3, 4], GREEDY)
    device.launch(batch_of((0, 0, [1, 2, 3], True))).wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = device.launch(batch_of((0, 3, [0], True)))
        for position in range(4, 20):
            following = device.launch(batch_of((0, position, [0], True)))
            pending.wait()
            pending = following
        assert pending.wait()[0] >= 0
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_the_pool_is_sized_from_the_memory_that_is_left() -> None:
    settings = load({"device": "cuda", "dtype": "float32", "max-num-seqs": 4}, {})
    device = open_device(settings, checkpoint("llama"))
    assert device.capacity.num_blocks == 4 * 16
    device.add(0, [1], GREEDY)
    assert device.launch(batch_of((0, 0, [1, 2, 3], True))).wait()[0] >= 0
    device.close()


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("rows", "captured"),
    [([(1, 9), (1, 16), (1, 1)], False), ([(1, 9), (1, 16), (1, 1)], True), ([(5, 9), (1, 30), (7, 7)], False)],
)
@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize("more", [{}, {"window": 6}, {"soft_cap": 0.7}])
def test_flashinfer_attends_as_the_other_backend(size: int, more: dict[str, Any], rows: Rows, captured: bool) -> None:
    pytest.importorskip("flashinfer")
    case = OneLayer(Attention(8, 2, size, size**-0.5, **more), rows, CudaRuntime(), torch.bfloat16)
    outputs = [case.by(backend, captured=captured) for backend in (TritonBackend, FlashInferBackend)]
    torch.testing.assert_close(*outputs, atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="device cuda"):
        open_device(load({"device": "cuda"}, {}), checkpoint("llama"))
