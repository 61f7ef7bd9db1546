"""Divides the memory of this machine among the models of a stack, before anything is loaded."""

import asyncio
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.memory_need import memory_need, shares
from pagewire.shared.models.model_folder import served_name
from pagewire.shared.process.linux_process import free_memory
from pagewire.shared.settings.config import Settings

GPU_QUERY = ("nvidia-smi", "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits")
"""Command that prints the MiB of each GPU."""
QUERY_TIMEOUT = 20.0
"""Seconds within which it must answer."""


async def share_memory(models: Sequence[Settings], promised: int = 0, *, always: bool = False) -> list[Settings]:
    """Returns the settings of the models, each with the bytes of its device that it may take in `model_memory`.

    A model that is alone may take what is free when it is loaded, so it gets no bound, unless `always`.

    Args:
        models: settings with the paths of the models and a device that is not auto.
        promised: bytes of this machine's own memory, not of its GPUs, that models which run already may still take.
        always: whether a model that is alone gets a bound, too.

    Raises:
        ConfigurationError: the needs of the models exceed what is free.
    """
    if len(models) == 1 and not always:
        return list(models)
    return await asyncio.to_thread(_share, models, promised)


def _share(models: Sequence[Settings], promised: int) -> list[Settings]:
    bounds: dict[str, int] = {}
    for on_gpu in (False, True):
        here = [each for each in models if (each.device == "cuda") == on_gpu]
        if not here:
            continue
        free = free_gpu_memory(here[0].gpu_memory_utilization) if on_gpu else free_memory() - promised
        needs = {served_name(each): each.model_memory or memory_need(each, Path(each.model)) for each in here}
        fixed = {served_name(each) for each in here if each.model_memory is not None}
        bounds |= shares(needs, free, fixed)
    return [msgspec.structs.replace(each, model_memory=bounds[served_name(each)]) for each in models]


def free_gpu_memory(utilization: float) -> int:
    """Returns the bytes that can be used on each visible GPU: those that are free, without the share that is left
    unused.

    Raises:
        ConfigurationError: `nvidia-smi` does not say how many there are.
    """
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        command = (*GPU_QUERY, *(("--id", visible) if visible else ()))
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT, check=True)
        gpus = [[int(number) << 20 for number in line.split(",")] for line in done.stdout.splitlines()]
        return min(free - int(total * (1 - utilization)) for free, total in gpus)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigurationError(
            f"nvidia-smi does not tell the free memory of the GPUs ({error}): serve one model per stack there"
        ) from error
