"""Loads a model, or a rank's part of it, for the CPU kernels."""

from pathlib import Path
from typing import Any

import torch

from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.services.executor.devices.cpu.device import multiplies_bf16
from pagewire.services.executor.devices.cpu.weight_packing import CpuPacking
from pagewire.services.executor.models.model import CausalLM
from pagewire.services.executor.models.registry import is_native, load_model
from pagewire.services.executor.models.shard import ALONE, Collectives, Shard
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.settings.config import Settings


def load_part(
    settings: Settings,
    folder: Path,
    config: dict[str, Any],
    kernels: CpuKernels,
    shard: Shard = ALONE,
    collectives: Collectives | None = None,
) -> CausalLM:
    """Loads the model of `folder`, whose config.json is `config`; of several ranks, the part of `shard`.

    Raises:
        ConfigurationError: the model cannot be loaded as configured.
    """
    native = is_native(config)
    if settings.enable_lora and not native and not shard.alone:
        raise ConfigurationError("transformers computes this model, without adapters: leave enable-lora out")
    emulated = settings.dtype == "auto" and not native and not multiplies_bf16(Path("/proc/cpuinfo"))
    packing = _packing(settings, kernels if native else None)
    random = settings.seed if settings.load_format == "dummy" else None
    dtype = "float32" if emulated else settings.dtype
    return load_model(folder, config, dtype, packing, random, shard, collectives)


def cache_dtype(settings: Settings, model: CausalLM) -> torch.dtype:
    """Returns the dtype of the KV pool."""
    return torch.int8 if settings.kv_cache_dtype == "int8" else model.embedding.dtype


def _packing(settings: Settings, kernels: CpuKernels | None) -> CpuPacking | None:
    """Returns how weights become integers; None if they do not, as where `transformers` computes, without `kernels`."""
    if settings.quantization == "none" or (settings.quantization == "auto" and settings.dtype != "auto"):
        return None
    bits = {"auto": None, "int8": 8, "int4": 4}[settings.quantization]
    if kernels is None and bits is not None:
        raise ConfigurationError(
            f"quantization {settings.quantization} needs a model that the CPU kernels compute: set it to auto"
        )
    return None if kernels is None else CpuPacking(kernels, bits)
