"""Opens the GPU: loads the model, measures the free memory, allocates the KV pool and captures the graphs."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from pagewire.services.executor.adapters.targets import served_targets
from pagewire.services.executor.devices.candidates import MAX_CANDIDATES
from pagewire.services.executor.devices.capacity import check_length, log_pool, pool_blocks
from pagewire.services.executor.devices.cuda.adapters import CudaAdapters
from pagewire.services.executor.devices.cuda.attention.flashinfer_backend import FlashInferBackend
from pagewire.services.executor.devices.cuda.attention.flashinfer_limits import check_model, find_flashinfer, refused
from pagewire.services.executor.devices.cuda.attention.step_attention import AttentionBackend
from pagewire.services.executor.devices.cuda.attention.triton_backend import TritonBackend
from pagewire.services.executor.devices.cuda.device import CudaDevice
from pagewire.services.executor.devices.cuda.fused_layers import with_kernels
from pagewire.services.executor.devices.cuda.graph_sizes import Bucket
from pagewire.services.executor.devices.cuda.kv_pool import KVPool
from pagewire.services.executor.devices.cuda.machine import capability
from pagewire.services.executor.devices.cuda.quantized_linear import CudaPacking
from pagewire.services.executor.devices.cuda.runtime import CudaRuntime, Runtime
from pagewire.services.executor.devices.cuda.slot_tables import GpuSlots
from pagewire.services.executor.devices.cuda.step import Forward, Sampler, StepMemory
from pagewire.services.executor.devices.cuda.step_columns import StepColumns
from pagewire.services.executor.devices.defaults import GPU, slots_of
from pagewire.services.executor.devices.gathered_attention import GatheredPool
from pagewire.services.executor.devices.logprobs import LogprobsMode
from pagewire.services.executor.devices.protocol import NO_ROWS, Capacity
from pagewire.services.executor.models.config_json import Common, parse, weights_dtype
from pagewire.services.executor.models.model import CausalLM
from pagewire.services.executor.models.registry import build_model, is_native, load_model
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import max_model_len, read_config
from pagewire.shared.settings.config import Settings, uses_flashinfer

FP8 = torch.float8_e4m3fn
FP8_SINCE = (8, 9)
"""First compute capability with instructions to convert to and from fp8."""
GRAPHS = 1 << 30
"""Bytes reserved for captured graphs, which are allocated after the KV pool."""
BACKENDS: Mapping[str, Callable[[KVPool, Capacity, Runtime], AttentionBackend]] = {
    "triton": TritonBackend,
    "TRITON_ATTN": TritonBackend,
    "flashinfer": FlashInferBackend,
    "FLASHINFER": FlashInferBackend,
}
"""Backends of attention, by the values of the setting `attention_backend`."""


def check_cache(kv_cache_dtype: str, version: tuple[int, int]) -> None:
    """Checks that a GPU of this compute capability supports the KV cache dtype.

    Raises:
        ConfigurationError: the GPU does not support it.
    """
    if kv_cache_dtype == "fp8" and version < FP8_SINCE:
        raise ConfigurationError(
            "this GPU does not support fp8, which needs compute capability 8.9: set kv-cache-dtype to auto"
        )


def check_backend(settings: Settings, config: dict[str, Any]) -> None:
    """Checks that the backend of attention is there, and computes the model of a config.json of a native family.

    Raises:
        ConfigurationError: it is not, or does not.
    """
    if not uses_flashinfer(settings):
        return
    if settings.batch_invariant:
        raise refused("batch-invariant")
    find_flashinfer()
    if is_native(config):
        check_model(build_model(config).spec, weights_dtype(settings.dtype, parse(Common, config)))


def open_cuda(settings: Settings, folder: Path) -> CudaDevice:
    """Opens the current GPU with the model of `folder`, its KV pool, and a graph for every bucket.

    Raises:
        ConfigurationError: the model cannot be loaded, or the pool would be too small.
    """
    if settings.tensor_parallel_size > 1:
        raise ConfigurationError("device cuda does not support a tensor-parallel-size above 1: set it to 1")
    check_cache(settings.kv_cache_dtype, capability())
    config = read_config(folder)
    check_backend(settings, config)
    length = max_model_len(settings, config)
    runtime, backend = CudaRuntime(), BACKENDS[settings.attention_backend]
    packing = None if settings.quantization == "none" else CudaPacking(fp8=capability() >= FP8_SINCE)
    random = settings.seed if settings.load_format == "dummy" else None
    plain = load_model(folder, config, settings.dtype, packing, random)
    spec, dtype = plain.spec, plain.embedding.dtype
    check_length(spec, length)
    if uses_flashinfer(settings):
        check_model(spec, dtype)
    if not is_native(config):
        # On the CPU, where the model is now: the kernels of both devices follow the same constants.
        from pagewire.services.executor.devices.self_test import prove  # transformers take seconds to load

        loaded, plain = plain, prove(plain, GatheredPool, settings.block_size, length)
        if settings.enable_lora and plain is loaded:
            raise ConfigurationError("transformers computes this model, without adapters: leave enable-lora out")
    cached = FP8 if settings.kv_cache_dtype == "fp8" else dtype
    targets = served_targets(plain, config) if settings.enable_lora else None
    model = with_kernels(plain, length, runtime.device)
    slots, block_size = slots_of(settings), settings.block_size
    tokens = settings.max_num_batched_tokens or GPU.step_tokens
    adapters = None
    if targets is not None:
        most = max(slots, tokens)
        adapters = CudaAdapters(runtime, targets, dtype, settings.max_loras, settings.max_lora_rank, most)
        adapters.attach(model)

    windows = spec.groups.windows
    empty = Capacity(0, block_size, slots, length, spec.vocab_size, windows=windows)
    _run_padding(
        model, empty, tokens, backend(KVPool(spec, empty, dtype, runtime, tokens, cached), empty, runtime), runtime
    )
    free, total = torch.cuda.mem_get_info()

    block_bytes = KVPool.bytes_per_block(spec, block_size, cached)
    usable = free - int(total * (1 - settings.gpu_memory_utilization))
    if settings.model_memory is not None:
        usable = min(usable, settings.model_memory - torch.cuda.memory_reserved())
    kv_memory = usable - GRAPHS - block_bytes
    blocks = pool_blocks(settings, length, block_bytes, kv_memory, free - block_bytes, windows)
    capacity = Capacity(
        num_blocks=blocks,
        block_size=block_size,
        max_num_seqs=min(slots, blocks // len(windows)),
        max_model_len=length,
        vocab_size=spec.vocab_size,
        max_candidates=MAX_CANDIDATES,
        step_tokens=tokens,
        mixed_prompt_tokens=GPU.mixed_prompt_tokens,
        windows=windows,
    )
    pool = KVPool(spec, capacity, dtype, runtime, tokens, cached)
    log_pool(capacity, block_bytes)
    mode = LogprobsMode(settings.logprobs_mode)
    invariant = settings.batch_invariant
    device = CudaDevice(
        model,
        capacity,
        pool,
        runtime,
        tokens,
        backend=backend,
        batch_invariant=invariant,
        mode=mode,
        adapters=adapters,
    )
    device.capture()
    return device


def _run_padding(model: CausalLM, capacity: Capacity, tokens: int, backend: AttentionBackend, runtime: Runtime) -> None:
    """Runs a step of padding only, which takes as much memory as the largest step, and the allocator keeps it."""
    slots = capacity.max_num_seqs
    tokens = min(tokens, slots * capacity.max_model_len)  # more positions than the slots have are in no step
    tables, columns = GpuSlots(capacity, runtime.device), StepColumns(runtime, slots, depth=1)
    memory = StepMemory(slots, capacity.vocab_size, runtime.device)
    forward = Forward(model, backend, tables, columns, memory, Bucket(min(slots, tokens), tokens, decode=False))
    forward.plan(NO_ROWS)
    forward.run()
    Sampler(model, tables, columns, memory, slots).run()
    torch.cuda.synchronize()
