"""A model that drafts beside another one, on a CPU or a GPU: what it must have, and the memory that both take."""

import json
import shutil
from pathlib import Path

import pytest

import tests.kernels.conftest  # noqa: F401  # before Triton is imported
from pagewire.services.executor.devices import open_device
from pagewire.services.executor.devices.cuda.device import CudaDevice
from pagewire.services.executor.devices.protocol import Device
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import CONTEXT, checkpoint
from tests.support.interpreted import interpreted

MEMORY = 1 << 22
"""Bytes of both KV pools."""


def opened(draft: Path, name: str = "llama", device: str = "cpu", **keys: object) -> Device:
    config = json.dumps({"method": "draft_model", "model": str(draft), **keys})
    folder = checkpoint(name)
    settings = Settings(
        model=str(folder), device=device, kv_cache_memory=MEMORY, max_num_seqs=3, speculative_config=config
    )
    return open_device(settings, folder)


def test_both_pools_hold_as_many_positions_in_the_memory_that_is_set() -> None:
    device = opened(checkpoint("gemma3"), max_model_len=100)
    assert device.draft_model is not None
    both, draft = device.capacity, device.draft_model.capacity
    assert (draft.max_num_seqs, draft.max_model_len, both.max_model_len) == (3, 100, CONTEXT)
    assert draft.num_blocks == both.num_blocks * len(draft.windows)
    assert len(draft.windows) > len(both.windows)
    assert both.pool_bytes > 1.5 * draft.pool_bytes
    assert 0.9 * MEMORY < both.pool_bytes <= MEMORY
    device.close()


def pool_bytes(device: Device) -> int:
    """Bytes of the blocks of a GPU, without the one for rows that do not run."""
    assert isinstance(device, CudaDevice)
    caches = {cache.data_ptr(): cache for pair in device._pool.caches for cache in pair}
    return sum(cache[:-1].nbytes for cache in caches.values())


def test_both_pools_of_a_gpu_hold_as_many_positions_in_the_memory_that_is_set() -> None:
    with interpreted():
        device = opened(checkpoint("gemma3"), device="cuda", max_model_len=100)
    assert device.draft_model is not None
    own, draft = device.capacity, device.draft_model.capacity
    assert (draft.max_num_seqs, draft.max_model_len, own.max_model_len) == (3, 100, CONTEXT)
    assert draft.num_blocks == own.num_blocks * len(draft.windows)
    assert own.max_drafts > draft.max_drafts == 0
    assert 0.9 * MEMORY < pool_bytes(device) + pool_bytes(device.draft_model) <= MEMORY
    device.close()


def test_a_quantization_that_a_gpu_does_not_have_is_refused_for_a_draft_model_too() -> None:
    with interpreted(), pytest.raises(ConfigurationError, match="device cuda does not support quantization int4"):
        opened(checkpoint("llama"), device="cuda", quantization="int4")


def test_another_tokenizer_is_refused_in_a_line(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(checkpoint("llama"), other)
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace("<|end|>", "<|stop|>"))
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (other / name).exists():
            (other / name).write_text((other / name).read_text().replace("<|end|>", "<|stop|>"))
    with pytest.raises(ConfigurationError) as raised:
        opened(other)
    reason = str(raised.value)
    assert "has other tokens than the model's, such as '<|end|>', none instead of 0" in reason
    assert "\n" not in reason


def test_a_draft_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"there is no file /nowhere\.gguf"):
        opened(Path("/nowhere.gguf"))


def test_a_draft_model_is_for_a_model_that_kernels_compute() -> None:
    with pytest.raises(ConfigurationError, match="transformers computes this model, without drafted tokens"):
        opened(checkpoint("llama"), "gpt-oss")
