"""The devices that an executor can run on, behind one protocol."""

import os
from pathlib import Path

import structlog
import torch

from services.executor.devices.attention import KVCache
from services.executor.devices.capacity import free_memory, pool_blocks
from services.executor.devices.cpu import CpuDevice, has_half_precision
from services.executor.devices.protocol import Capacity, Device
from services.executor.models.registry import load_model
from shared.config import Settings
from shared.errors import ConfigurationError
from shared.model_folder import max_model_len, read_config

__all__ = ["open_device"]

_log = structlog.get_logger()


def open_device(settings: Settings, folder: Path) -> Device:
    """The device that the settings name, with the model of `folder` loaded and the KV pool allocated.

    Raises:
        ConfigurationError: the device is not built yet, the model cannot be loaded, or the pool would be too small.
    """
    if settings.device != "cpu":
        raise ConfigurationError(f"device {settings.device} is not built yet: set device to cpu")
    if settings.tensor_parallel_size > 1:
        raise ConfigurationError("a tensor-parallel-size above 1 is not built yet: set it to 1")
    config = read_config(folder)
    length = max_model_len(settings, config)
    if (cores := len(os.sched_getaffinity(0))) > 2:
        torch.set_num_threads(min(torch.get_num_threads(), cores - 1))  # the other services need a core too
    emulated = settings.dtype == "auto" and not has_half_precision(Path("/proc/cpuinfo"))
    model = load_model(folder, config, "float32" if emulated else settings.dtype)
    block_bytes = KVCache.bytes_per_block(model.spec, settings.block_size, model.embedding.dtype)
    blocks = pool_blocks(settings, length, block_bytes, free_memory())
    capacity = Capacity(blocks, settings.block_size, settings.max_num_seqs, length, model.spec.vocab_size)
    _log.info("kv_pool", blocks=blocks, tokens=blocks * settings.block_size, bytes=blocks * block_bytes)
    return CpuDevice(model, capacity)
