"""An fp8 cache: the logits are those of a CPU whose keys and values are rounded to fp8, in half the memory."""

import pytest
import torch
from torch import Tensor

from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.devices.cpu.cores import Cores
from pagewire.services.executor.devices.cpu.device import CpuDevice
from pagewire.services.executor.devices.cpu.slots import CpuSlots
from pagewire.services.executor.devices.cuda.device import CudaDevice
from pagewire.services.executor.devices.cuda.kv_pool import KVPool
from pagewire.services.executor.devices.cuda.open import check_cache, open_cuda
from pagewire.services.executor.devices.cuda.part import FP8_SINCE
from pagewire.services.executor.devices.protocol import StepBatch
from pagewire.services.executor.models.model import AttentionFn, ModelSpec
from pagewire.services.executor.models.registry import load_model
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import read_config
from pagewire.shared.settings.config import load
from tests.services.executor.devices.cuda.twins import (
    BLOCK_SIZE,
    CAPACITY,
    GREEDY,
    batch_of,
    cpu_device,
    cuda_device,
    runtime,
)
from tests.support.checkpoints import checkpoint
from tests.support.reference import ReferenceBackend

GPU = torch.cuda.is_available()
pytestmark = [
    *([pytest.mark.cuda] if GPU else []),
    pytest.mark.skipif(GPU and torch.cuda.get_device_capability() < FP8_SINCE, reason="the GPU does not convert fp8"),
]
PROMPT = [7, 300, 41, 5, 88, 12, 450, 3, 77, 140, 9, 31, 256, 64, 2, 19, 500, 18]
FP8 = torch.float8_e4m3fn
TOLERANCE = 1e-4
"""Absolute and relative, on logits."""


class Rounding(ReferenceBackend):
    """Keys and values lose what fp8 cannot hold."""

    def attention(self, batch: StepBatch, slots: CpuSlots) -> AttentionFn:
        plain = super().attention(batch, slots)

        def rounded(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
            return plain(layer, q, k.to(FP8).float(), v.to(FP8).float(), sinks)

        return rounded


def rounding_device(name: str) -> CpuDevice:
    model = load_model(checkpoint(name), read_config(checkpoint(name)), "float32")
    return CpuDevice(model, CAPACITY, Rounding(model.spec, CAPACITY, torch.float32), Cores(1, torch.set_num_threads))


def logits(device: CpuDevice | CudaDevice) -> Tensor:
    """[2, V] behind a prompt of which a part was cached before, and behind a decode."""
    seen: list[Tensor] = []
    plain = device._model.logits

    def kept(hidden: Tensor, out: Tensor | None = None) -> Tensor:
        result = plain(hidden, out)
        seen.append(result[:1].clone().cpu())
        return result

    device._model.logits = kept  # type: ignore[method-assign]
    device.add(1, [9, 4], GREEDY)
    device.launch(batch_of((1, 0, PROMPT[:7], False))).wait()
    token = device.launch(batch_of((1, 7, PROMPT[7:], True))).wait()
    device.launch(batch_of((1, len(PROMPT), token.tolist(), True))).wait()
    return torch.cat(seen[-2:])


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_logits_follow_from_rounded_keys_and_values(name: str) -> None:
    """Within float32's tolerance: the kernels round as PyTorch does, and nothing else is lost."""
    result, expected = logits(cuda_device(name, captured=False, cached=FP8)), logits(rounding_device(name))
    torch.testing.assert_close(result, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert (result - logits(cpu_device(name))).abs().max() > 100 * TOLERANCE, "the cache is not what was asked for"


def test_a_block_takes_half_of_the_memory_of_a_16_bit_one() -> None:
    spec = ModelSpec(512, (Attention(heads=32, kv_heads=8, head_size=128, scale=128**-0.5),) * 4)
    size = KVPool.bytes_per_block(spec, BLOCK_SIZE, FP8)
    assert KVPool.bytes_per_block(spec, BLOCK_SIZE, torch.bfloat16) == 2 * size
    pool = KVPool(spec, CAPACITY, torch.float32, runtime(), 1, FP8)
    assert sum(keys.nbytes + values.nbytes for keys, values in pool.caches) == (CAPACITY.num_blocks + 1) * size


def test_a_gpu_that_does_not_convert_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    with pytest.raises(ConfigurationError, match="kv-cache-dtype"):
        open_cuda(load({"device": "cuda", "kv-cache-dtype": "fp8"}, {}), checkpoint("llama"))


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
def test_a_gpu_that_converts_fp8_may_keep_it(capability: tuple[int, int]) -> None:
    check_cache("fp8", capability)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6)])
def test_every_gpu_keeps_its_own_dtype_and_older_ones_no_fp8(capability: tuple[int, int]) -> None:
    check_cache("auto", capability)
    with pytest.raises(ConfigurationError, match="set kv-cache-dtype to auto"):
        check_cache("fp8", capability)
