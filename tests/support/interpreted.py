"""The device `cuda` for a pipeline on a machine without a GPU: the same kernels under Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

import tests.kernels.conftest  # noqa: F401  # before Triton is imported
from pagewire.services.executor import devices
from pagewire.services.executor.devices.candidates import MAX_CANDIDATES
from pagewire.services.executor.devices.cuda.device import CudaDevice
from pagewire.services.executor.devices.cuda.fused_layers import with_kernels
from pagewire.services.executor.devices.cuda.kv_pool import KVPool
from pagewire.services.executor.devices.defaults import slots_of
from pagewire.services.executor.devices.logprobs import LogprobsMode
from pagewire.services.executor.devices.protocol import Capacity
from pagewire.services.executor.models.registry import load_model
from pagewire.shared.models.model_folder import max_model_len, read_config
from pagewire.shared.settings.config import STEP_TOKENS, Settings
from tests.support.host_runtime import HostRuntime


def open_interpreted(settings: Settings, folder: Path) -> CudaDevice:
    """Opens the device as `open_cuda` does, without measuring and without graphs; the settings name the blocks."""
    assert settings.num_kv_blocks is not None
    runtime, config = HostRuntime(), read_config(folder)
    length, tokens = max_model_len(settings, config), settings.max_num_batched_tokens or STEP_TOKENS
    plain = load_model(folder, config, settings.dtype)
    spec, dtype = plain.spec, plain.embedding.dtype
    blocks, slots = settings.num_kv_blocks, slots_of(settings)
    capacity = Capacity(
        blocks, settings.block_size, slots, length, spec.vocab_size, MAX_CANDIDATES, windows=spec.groups.windows
    )
    pool = KVPool(spec, capacity, dtype, runtime, tokens)
    model = with_kernels(plain, length, runtime.device)
    return CudaDevice(model, capacity, pool, runtime, tokens, mode=LogprobsMode(settings.logprobs_mode))


@contextmanager
def interpreted() -> Iterator[None]:
    """Lets `--device cuda` run where there is no GPU."""
    if torch.cuda.is_available():
        yield
        return
    with patch.object(devices, "_open_cuda", open_interpreted):
        yield
