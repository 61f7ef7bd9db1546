"""The devices that an executor can run on, behind one protocol."""

import functools
import os
from pathlib import Path
from typing import Any

import structlog
import torch

from pagewire.kernels.cpu import build
from pagewire.kernels.cpu.kernels import CpuKernels
from pagewire.services.executor.adapters.targets import Targets, targets_of
from pagewire.services.executor.devices.candidates import MAX_CANDIDATES
from pagewire.services.executor.devices.capacity import check_length, log_pool, pool_blocks, usable_memory
from pagewire.services.executor.devices.cpu.adapters import CpuAdapters
from pagewire.services.executor.devices.cpu.compiled_backend import CompiledBackend
from pagewire.services.executor.devices.cpu.compiled_model import CompiledLM
from pagewire.services.executor.devices.cpu.cores import Cores
from pagewire.services.executor.devices.cpu.device import CpuDevice, multiplies_bf16
from pagewire.services.executor.devices.cpu.weight_packing import CpuPacking
from pagewire.services.executor.devices.defaults import defaults_of, slots_of
from pagewire.services.executor.devices.logprobs import LogprobsMode
from pagewire.services.executor.devices.protocol import Capacity, Device
from pagewire.services.executor.devices.sim.device import SimDevice
from pagewire.services.executor.devices.sim.roofline import GPUS, Roofline, shape_of
from pagewire.services.executor.models.model import CausalLM
from pagewire.services.executor.models.registry import build_model, is_native, load_model
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.memory_need import POOL_SHARE
from pagewire.shared.models.model_folder import eos_ids, max_model_len, read_config
from pagewire.shared.process import device_choice
from pagewire.shared.settings.config import Settings

__all__ = ["open_device"]

MAX_STEP_TOKENS = 4096
"""Maximum tokens of a step on a CPU: beyond it, the fixed cost of a step is negligible even for a small model."""
_KV_CACHE_DTYPES = {"cpu": "int8", "cuda": "fp8"}
"""The `kv_cache_dtype` that a device supports beside auto."""
MAX_DRAFTS = 64
"""Drafted tokens of a row on a CPU, where compiled kernels give each position the result that it has alone."""

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
    if settings.quantization in ("int8", "int4") and settings.device != "cpu":
        raise ConfigurationError(
            f"device {settings.device} does not support quantization {settings.quantization}: set it to auto"
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
    if settings.enable_lora and settings.device != "cpu":
        raise ConfigurationError(f"device {settings.device} does not support enable-lora: leave it out")
    if settings.device == "cpu":
        return _open_cpu(settings, folder)
    if settings.device == "cuda":
        return _open_cuda(settings, folder)
    kind, _, gpu = settings.device.partition(":")
    if kind == "sim":
        return _open_sim(settings, folder, gpu)
    raise ConfigurationError(f"unknown device {settings.device}: set device to auto, cpu, cuda or sim:<gpu>")


def _open_cpu(settings: Settings, folder: Path) -> Device:
    if settings.tensor_parallel_size > 1:
        raise ConfigurationError("device cpu does not support a tensor-parallel-size above 1: set it to 1")
    config = read_config(folder)
    length = max_model_len(settings, config)
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    if cores > 2:
        threads = min(threads, cores - 1)  # leaves a core for the other services
    threads = max(1, threads // settings.data_parallel_size)
    _log.info("loading_kernels", first_time="they are compiled, which takes about 15 s")
    kernels = CpuKernels(build.load(), threads)

    native = is_native(config)
    emulated = settings.dtype == "auto" and not native and not multiplies_bf16(Path("/proc/cpuinfo"))
    packing = _packing(settings, kernels if native else None)
    random = settings.seed if settings.load_format == "dummy" else None
    loaded = load_model(folder, config, "float32" if emulated else settings.dtype, packing, random)

    model = loaded
    spec, dtype = model.spec, model.embedding.dtype
    cached = torch.int8 if settings.kv_cache_dtype == "int8" else dtype
    check_length(spec, length)
    block_bytes = CompiledBackend.bytes_per_block(kernels, spec, settings.block_size, cached)
    if not native:
        from pagewire.services.executor.devices.self_test import prove  # transformers take seconds to load

        model = prove(loaded, functools.partial(CompiledBackend, kernels), settings.block_size, length)
    compiled = native or model is not loaded
    del loaded
    if settings.enable_lora and not compiled:
        raise ConfigurationError("transformers computes this model, without adapters: leave enable-lora out")
    adapters = None
    if compiled:
        targets = _targets(model, config) if settings.enable_lora else None
        model = CompiledLM(model, kernels, length)
        if targets is not None:
            adapters = CpuAdapters(kernels, targets, model.numbers, dtype)

    def compute_on(count: int) -> None:
        kernels.threads = count
        # Beside the kernels, torch has only small operations left.
        torch.set_num_threads(1 if compiled else count)

    shared_cores = Cores(threads, compute_on)
    free = usable_memory(settings)
    windows = spec.groups.windows
    blocks = pool_blocks(settings, length, block_bytes, int(free * POOL_SHARE), free, windows)
    mode = LogprobsMode(settings.logprobs_mode)
    capacity = Capacity(
        num_blocks=blocks,
        block_size=settings.block_size,
        max_num_seqs=min(slots_of(settings), blocks // len(windows)),
        max_model_len=length,
        vocab_size=spec.vocab_size,
        max_candidates=MAX_CANDIDATES,
        max_step_tokens=MAX_STEP_TOKENS,
        windows=windows,
        pool_bytes=blocks * block_bytes,
        max_drafts=MAX_DRAFTS if compiled else 0,
    )
    log_pool(capacity, block_bytes)
    backend = CompiledBackend(kernels, spec, capacity, cached, adapters)
    return CpuDevice(model, capacity, backend, shared_cores, mode, adapters)


def _targets(model: CausalLM, config: dict[str, Any]) -> Targets:
    """Returns the modules that adapters can change of a model, whose matrices may be packed already if it is native."""
    built = build_model(config) if is_native(config) else model
    return targets_of(built, tuple(config.get("architectures") or ()))


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
