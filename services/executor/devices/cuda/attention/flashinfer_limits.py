"""Refuses in one line what FlashInfer cannot do here, before the weights are read."""

from importlib import import_module

import torch

from pagewire.services.executor.models.model import ModelSpec
from pagewire.shared.errors import ConfigurationError

HEAD_SIZES = (64, 128, 256)
"""Sizes of heads in FlashInfer's wheels of compiled kernels."""
DTYPES = (torch.float16, torch.bfloat16)


def find_flashinfer() -> str:
    """Returns the version of FlashInfer.

    Raises:
        ConfigurationError: it is not installed, or too old.
    """
    try:
        flashinfer = import_module("flashinfer")
    except ImportError as error:
        raise ConfigurationError(
            f"attention-backend flashinfer needs FlashInfer ({error}): pip install flashinfer-python"
        ) from error
    version = str(flashinfer.__version__)
    if not hasattr(flashinfer.BatchPrefillWithPagedKVCacheWrapper, "workspace_size"):
        raise ConfigurationError(
            f"FlashInfer {version} is too old for attention-backend flashinfer: pip install -U flashinfer-python"
        )
    return version


def check_model(spec: ModelSpec, dtype: torch.dtype) -> None:
    """Checks that FlashInfer computes the attention of a model with weights of `dtype`.

    Raises:
        ConfigurationError: it does not; the message says why.
    """
    if dtype not in DTYPES:
        raise ConfigurationError(
            f"attention-backend flashinfer does not support dtype {str(dtype).removeprefix('torch.')}: "
            "set dtype to bfloat16 or float16, or attention-backend to triton"
        )
    for layer in spec.layers:
        if layer.value_head_size != layer.head_size:
            raise refused(f"keys of {layer.head_size} and values of {layer.value_head_size}")
        if layer.head_size not in HEAD_SIZES:
            raise refused(f"heads of {layer.head_size}, only of {', '.join(map(str, HEAD_SIZES))}")
        if layer.chunk:
            raise refused("attention in chunks")


def refused(what: str) -> ConfigurationError:
    """Returns the error that FlashInfer does not support something, which the kernels of this project do."""
    return ConfigurationError(f"attention-backend flashinfer does not support {what}: set it to triton")
