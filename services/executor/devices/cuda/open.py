"""Opens the GPU: loads the model, measures the memory that is left, and captures the graphs."""

from pathlib import Path

import structlog
import torch

from pagewire.services.executor.devices.capacity import pool_blocks
from pagewire.services.executor.devices.cuda.attention import KVPool
from pagewire.services.executor.devices.cuda.buckets import Bucket
from pagewire.services.executor.devices.cuda.columns import StepColumns
from pagewire.services.executor.devices.cuda.device import CudaDevice
from pagewire.services.executor.devices.cuda.model import with_kernels
from pagewire.services.executor.devices.cuda.runtime import CudaRuntime
from pagewire.services.executor.devices.cuda.step import Step
from pagewire.services.executor.devices.cuda.tables import SlotTables
from pagewire.services.executor.devices.protocol import Capacity
from pagewire.services.executor.models.registry import load_model
from pagewire.shared.config import STEP_TOKENS, Settings
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.model_folder import max_model_len, read_config

FP8 = torch.float8_e4m3fn
FP8_SINCE = (8, 9)
"""Compute capability that converts to and from it."""
GRAPHS = 1 << 30
"""Bytes left for captured graphs, which come after the KV pool has taken its share."""

_log = structlog.get_logger()


def check_cache(kv_cache_dtype: str, capability: tuple[int, int]) -> None:
    """Whether a GPU of this compute capability can keep keys and values so.

    Raises:
        ConfigurationError: it cannot.
    """
    if kv_cache_dtype == "fp8" and capability < FP8_SINCE:
        raise ConfigurationError(
            "this GPU does not convert fp8, which compute capability 8.9 does: set kv-cache-dtype to auto"
        )


def open_cuda(settings: Settings, folder: Path) -> CudaDevice:
    """The current GPU with the model of `folder`, its KV pool, and a graph for every bucket.

    Raises:
        ConfigurationError: the model cannot be loaded, or the pool would be too small.
    """
    if settings.tensor_parallel_size > 1:
        raise ConfigurationError("a tensor-parallel-size above 1 is not built yet for cuda: set it to 1")
    check_cache(settings.kv_cache_dtype, torch.cuda.get_device_capability())
    config = read_config(folder)
    length, heads = max_model_len(settings, config), int(config["num_attention_heads"])
    runtime = CudaRuntime()
    plain = load_model(folder, config, settings.dtype)
    spec, dtype = plain.spec, plain.embedding.dtype
    cached = FP8 if settings.kv_cache_dtype == "fp8" else dtype
    model = with_kernels(plain, length, runtime.device)
    slots, block_size = settings.max_num_seqs, settings.block_size
    tokens = settings.max_num_batched_tokens or STEP_TOKENS

    # One step of nothing but padding takes the memory of the largest, which the allocator keeps.
    empty = Capacity(0, block_size, slots, length, spec.vocab_size)
    rehearsal = KVPool(spec, heads, empty, dtype, runtime, tokens, cached)
    tables, columns = SlotTables(empty, runtime.device), StepColumns(runtime, slots, depth=1)
    Step(model, rehearsal, tables, columns, Bucket(min(slots, tokens), tokens, decode=False)).run()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()

    block_bytes = KVPool.bytes_per_block(spec, block_size, cached)
    room = free - int(total * (1 - settings.gpu_memory_utilization)) - GRAPHS - block_bytes
    blocks = pool_blocks(settings, length, block_bytes, room, free - block_bytes)
    capacity = Capacity(blocks, block_size, slots, length, spec.vocab_size)
    pool = KVPool(spec, heads, capacity, dtype, runtime, tokens, cached)
    _log.info("kv_pool", blocks=blocks, tokens=blocks * block_size, bytes=blocks * block_bytes)
    device = CudaDevice(model, capacity, pool, runtime, tokens, batch_invariant=settings.batch_invariant)
    device.capture()
    return device
