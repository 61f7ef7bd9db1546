"""The size of the KV pool, by the memory that is free on a device."""

import os
from collections.abc import Sequence

import structlog

from pagewire.services.executor.devices.defaults import defaults_of, slots_of
from pagewire.services.executor.devices.protocol import Capacity
from pagewire.services.executor.models.model import ModelSpec
from pagewire.shared.block_tables import LOOKAHEAD_STEPS, blocks_of
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.process.linux_process import family_bytes, free_memory
from pagewire.shared.settings.config import Settings

_log = structlog.get_logger()


def pool_blocks(
    settings: Settings,
    max_model_len: int,
    bytes_per_block: int,
    free_bytes: int,
    limit_bytes: int | None,
    windows: Sequence[int] = (0,),
) -> int:
    """Returns the number of KV blocks: as set, or as many as the sequences that run at once can use and memory holds.

    The memory is `free_bytes`; `limit_bytes` bounds a pool whose size is set; None: a simulated device has no bound.
    `windows` are those of the groups of layers, as in `Capacity`.

    Raises:
        ConfigurationError: the pool does not hold one sequence of `max_model_len` tokens, or exceeds the memory.
    """
    budget = settings.max_num_batched_tokens or defaults_of(settings.device).step_tokens
    ahead = min(settings.lease_window, LOOKAHEAD_STEPS) * budget
    longest = blocks_of(-(-max_model_len // settings.block_size), windows, ahead, settings.block_size)
    if settings.num_kv_blocks is not None:
        blocks, source = settings.num_kv_blocks, "num-kv-blocks"
    elif settings.kv_cache_memory is not None:
        blocks, source = settings.kv_cache_memory // bytes_per_block, "kv-cache-memory"
    else:
        blocks = min(slots_of(settings) * longest, max(free_bytes, 0) // bytes_per_block)
        source = f"the free memory ({max(free_bytes, 0) / 1e9:.1f} GB)"
    if blocks < longest:
        raise ConfigurationError(
            f"{source} gives {blocks} KV blocks of {bytes_per_block} bytes, one sequence of {max_model_len} tokens "
            f"needs {longest}: raise kv-cache-memory or num-kv-blocks, or lower max-model-len"
        )
    if limit_bytes is not None and blocks * bytes_per_block > max(limit_bytes, free_bytes):
        raise ConfigurationError(
            f"{source} gives {blocks} KV blocks, which need {blocks * bytes_per_block / 1e9:.1f} GB, and "
            f"{max(limit_bytes, 0) / 1e9:.1f} GB are free: lower kv-cache-memory or num-kv-blocks, or leave both out"
        )
    return blocks


def check_length(spec: ModelSpec, max_model_len: int) -> None:
    """Checks that a model is exact in a context of `max_model_len` tokens.

    Raises:
        ConfigurationError: it is not.
    """
    if spec.max_length is not None and max_model_len > spec.max_length:
        raise ConfigurationError(
            f"beyond {spec.max_length} tokens this model's longrope depends on the longest sequence of a step: "
            f"set max-model-len to at most {spec.max_length}"
        )


def usable_memory(settings: Settings) -> int:
    """Returns the bytes that an executor on a CPU can still allocate with all its ranks: its part of what is free.

    Replicas have equal parts, and `model_memory` bounds what all replicas of the model hold together.
    """
    replicas = settings.data_parallel_size
    free = free_memory() // replicas
    if settings.model_memory is not None:
        free = min(free, settings.model_memory // replicas - family_bytes(os.getpid()))
    return max(free, 0)


def has_room_beside(device: str, resident: int) -> bool:
    """Returns whether an executor can open `device` while one that ends soon has it open and holds `resident` bytes.

    On the CPU twice as much must be free: the memory for the same model again, and as much for its KV pool to grow. A
    GPU's pool takes all memory that the weights leave.
    """
    return device.startswith("sim:") or (device == "cpu" and free_memory() >= 2 * resident)


def log_pool(capacity: Capacity, bytes_per_block: int) -> None:
    """Logs the size of a KV pool: the tokens are those that it holds if no window has left any behind."""
    blocks, groups = capacity.num_blocks, len(capacity.windows)
    tokens = blocks // groups * capacity.block_size
    _log.info("kv_pool", blocks=blocks, groups=groups, tokens=tokens, bytes=blocks * bytes_per_block)
