"""The KV pool."""

import pytest
import torch

from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.devices.cuda.kv_pool import KVPool
from pagewire.services.executor.devices.protocol import Capacity
from pagewire.services.executor.models.model import ModelSpec
from tests.services.executor.devices.cuda.twins import runtime


@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_are_copied_in_every_layer(cached: torch.dtype) -> None:
    where = runtime()
    spec = ModelSpec(90, (Attention(4, 2, 16, 0.25),) * 2)
    pool = KVPool(spec, Capacity(6, 4, 2, 32, 90), torch.bfloat16, where, 8, cached)
    for keys, values in pool.caches:
        for cache in (keys, values):
            cache.copy_(torch.randn(cache.shape, device=where.device))
    before = [cache.float() for layer in pool.caches for cache in layer]
    pool.copy(torch.tensor([4, 0], device=where.device), torch.tensor([1, 5], device=where.device))
    for old, new in zip(before, (cache.float() for layer in pool.caches for cache in layer), strict=True):
        assert torch.equal(new, old[[0, 4, 2, 3, 4, 0, 6]])
