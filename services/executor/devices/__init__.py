"""The devices that an executor can run on, behind one protocol."""

from pathlib import Path

import structlog
import torch

from pagewire.services.executor.devices.candidates import MAX_CANDIDATES
from pagewire.services.executor.devices.capacity import pool_blocks
from pagewire.services.executor.devices.defaults import defaults_of, slots_of
from pagewire.services.executor.devices.open_cpu import open_cpu
from pagewire.services.executor.devices.protocol import Capacity, Device
from pagewire.services.executor.devices.sim.device import SimDevice
from pagewire.services.executor.devices.sim.roofline import GPUS, Roofline, shape_of
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import eos_ids, max_model_len, read_config
from pagewire.shared.process import device_choice
from pagewire.shared.settings.config import Settings
from pagewire.shared.settings.speculation import draft_model

__all__ = ["open_device"]

_KV_CACHE_DTYPES = {"cpu": "int8", "cuda": "fp8"}
"""The `kv_cache_dtype` that a device supports beside auto."""
_log = structlog.get_logger()


def open_device(settings: Settings, folder: Path) -> Device:
    """Opens the device that the settings name, loads the model of `folder` and allocates the KV pool.

    Raises:
        ConfigurationError: the device is unknown or missing, the model cannot be loaded, or the pool would be too
            small.
    """
    settings = device_choice.resolve(settings)
    if settings.kv_cache_dtype not in ("auto", _KV_CACHE_DTYPES.get(settings.device)):
        raise ConfigurationError(
            f"device {settings.device} does not support kv-cache-dtype {settings.kv_cache_dtype}: set it to auto"
        )
    for each in (settings, draft_model(settings)):
        if each is not None and each.quantization in ("int8", "int4") and settings.device != "cpu":
            raise ConfigurationError(
                f"device {settings.device} does not support quantization {each.quantization}: set it to auto"
            )
    if settings.quantization in ("int8", "int4") and settings.load_format == "dummy":
        raise ConfigurationError(
            f"load-format dummy does not support quantization {settings.quantization}: set it to auto"
        )
    if settings.batch_invariant and settings.device != "cuda":
        raise ConfigurationError(f"device {settings.device} does not support batch-invariant: leave it out")
    if settings.attention_backend != "triton" and settings.device != "cuda":
        raise ConfigurationError(
            f"device {settings.device} does not support attention-backend {settings.attention_backend}: leave it out"
        )
    for name in ("lora-modules", "lora-dirs"):
        if getattr(settings, name.replace("-", "_")) and not settings.enable_lora:
            raise ConfigurationError(f"{name} needs enable-lora: set it too")
    if settings.enable_lora and settings.device not in ("cpu", "cuda"):
        raise ConfigurationError(f"device {settings.device} does not support enable-lora: leave it out")
    if settings.device == "cpu":
        return open_cpu(settings, folder)
    if settings.device == "cuda":
        return _open_cuda(settings, folder)
    kind, _, gpu = settings.device.partition(":")
    if kind == "sim":
        return _open_sim(settings, folder, gpu)
    raise ConfigurationError(f"unknown device {settings.device}: set device to auto, cpu, cuda or sim:<gpu>")


def _open_cuda(settings: Settings, folder: Path) -> Device:
    if not torch.cuda.is_available():
        raise ConfigurationError("device cuda needs a GPU that PyTorch can use, and there is none: set device to cpu")
    from pagewire.services.executor.devices.cuda.open import open_cuda  # Triton takes a second to load

    return open_cuda(settings, folder)


def _open_sim(settings: Settings, folder: Path, name: str) -> Device:
    """Opens a simulated device. `folder` needs no weights, only config.json and, for other services, the tokenizer."""
    if name != "zero" and name not in GPUS:
        names = ", ".join(f"sim:{gpu}" for gpu in (*GPUS, "zero"))
        raise ConfigurationError(f"unknown device sim:{name}: set device to one of {names}")
    if settings.dtype == "float32":
        raise ConfigurationError("simulated devices compute in bf16: leave dtype at auto")
    config = read_config(folder)
    length, shape = max_model_len(settings, config), shape_of(config)
    gpu = GPUS.get(name)
    roofline = Roofline(shape, gpu or GPUS["h100"], settings.tensor_parallel_size)
    memory = roofline.kv_memory(settings.gpu_memory_utilization)
    blocks = pool_blocks(settings, length, roofline.kv_bytes * settings.block_size, memory, None)
    capacity = Capacity(
        num_blocks=blocks,
        block_size=settings.block_size,
        max_num_seqs=min(slots_of(settings), blocks),
        max_model_len=length,
        vocab_size=shape.vocab,
        max_candidates=MAX_CANDIDATES,
        step_tokens=defaults_of(settings.device).step_tokens,
        mixed_prompt_tokens=defaults_of(settings.device).mixed_prompt_tokens,
    )
    _log.info("kv_pool", blocks=blocks, tokens=blocks * settings.block_size, simulated=True)
    return SimDevice(capacity, roofline if gpu else None, eos_ids(folder))
