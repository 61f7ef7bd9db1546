"""A model that drafts beside another one on a CPU: what it must have, and the memory that both take."""

import json
import shutil
from pathlib import Path

import pytest

from pagewire.services.executor.devices import open_device
from pagewire.services.executor.devices.protocol import Device
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import CONTEXT, checkpoint


def opened(draft: Path, name: str = "llama", **keys: object) -> Device:
    config = json.dumps({"method": "draft_model", "model": str(draft), **keys})
    folder = checkpoint(name)
    settings = Settings(
        model=str(folder), device="cpu", kv_cache_memory=1 << 22, max_num_seqs=3, speculative_config=config
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
    assert 0.9 * (1 << 22) < both.pool_bytes <= 1 << 22
    device.close()


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
