"""Opens the GPU, or several: checks that they can compute the model as configured."""

from pathlib import Path
from typing import Any

import torch

from pagewire.services.executor.devices.cuda.attention.flashinfer_limits import check_model, find_flashinfer, refused
from pagewire.services.executor.devices.cuda.device import CudaDevice
from pagewire.services.executor.devices.cuda.machine import capability
from pagewire.services.executor.devices.cuda.part import FP8_SINCE, CudaPart
from pagewire.services.executor.devices.cuda.ranks.leader import RankedCudaDevice, open_ranks
from pagewire.services.executor.devices.cuda.runtime import CudaRuntime
from pagewire.services.executor.models.config_json import Common, parse, weights_dtype
from pagewire.services.executor.models.registry import build_model, is_native
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import read_config
from pagewire.shared.settings.config import Settings, uses_flashinfer


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


def check_ranks(settings: Settings, config: dict[str, Any], gpus: int) -> None:
    """Checks that so many GPUs can share the model of a config.json as configured.

    Raises:
        ConfigurationError: there are too few, or they cannot.

    >>> check_ranks(Settings(tensor_parallel_size=4), {}, gpus=2)
    Traceback (most recent call last):
    pagewire.shared.errors.ConfigurationError: tensor-parallel-size 4 needs 4 GPUs, and 2 are visible: set it to 2
    """
    ranks = settings.tensor_parallel_size
    if ranks > gpus:
        raise ConfigurationError(
            f"tensor-parallel-size {ranks} needs {ranks} GPUs, and {gpus} are visible: set it to {gpus}"
        )
    for name, used in (
        ("batch-invariant", settings.batch_invariant),
        ("attention-backend flashinfer", uses_flashinfer(settings)),
    ):
        if used:
            raise ConfigurationError(f"{name} does not work with several GPUs: leave it out")
    if not is_native(config):
        raise ConfigurationError("transformers computes this model, on one rank alone: set tensor-parallel-size to 1")


def open_cuda(settings: Settings, folder: Path) -> CudaDevice | RankedCudaDevice:
    """Opens the first of the visible GPUs, or as many as there are ranks, with the model of `folder`.

    Raises:
        ConfigurationError: the model cannot be loaded, or the pool would be too small.
        DeviceLost: a rank has ended, or does not arrive in time.
    """
    check_cache(settings.kv_cache_dtype, capability())
    config = read_config(folder)
    check_backend(settings, config)
    if settings.tensor_parallel_size > 1:
        check_ranks(settings, config, torch.cuda.device_count())
        return open_ranks(settings, folder, config)
    part = CudaPart.load(settings, folder, config, CudaRuntime()).with_draft_model()
    return part.open(part.capacity([part.measure()]))
