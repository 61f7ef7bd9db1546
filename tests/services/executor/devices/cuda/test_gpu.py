"""What only a GPU can show: a loop that never waits for it, and a device opened through the settings."""

import pytest
import torch

from pagewire.services.executor.devices import open_device
from pagewire.shared.config import load
from pagewire.shared.errors import ConfigurationError
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="device cuda"):
        open_device(load({"device": "cuda"}, {}), checkpoint("llama"))
