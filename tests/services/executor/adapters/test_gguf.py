"""GGUF adapters give the logits of the PEFT adapters that they were converted from; bad ones are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagewire.services.executor.adapters.reading import read_adapter
from pagewire.shared.adapters.files import read_files
from pagewire.shared.errors import ConfigurationError
from tests.services.executor.adapters.test_bad_adapters import MAX_RANK, modules
from tests.services.executor.adapters.test_logits import text
from tests.support.adapters import TARGETS, logits_of, merged, write_gguf_adapter
from tests.support.checkpoints import checkpoint
from tests.support.device import Driver, Row


@pytest.mark.parametrize("alpha", [8.0, 0.0])
def test_logits_equal_merged_weights_logits(tmp_path: Path, alpha: float) -> None:
    ids = text(3)
    path = write_gguf_adapter(tmp_path / "a.gguf", checkpoint("llama"), rank=4, alpha=alpha)
    driver = Driver(checkpoint("llama"), adapters=True)
    driver.add(0, len(ids))
    driver.adapt(0, path)
    driver.step(Row(0, 0, ids))
    shape = lambda _: (4, alpha / 4 if alpha else 1.0)  # noqa: E731
    expected = logits_of(merged(checkpoint("llama"), TARGETS, shape, 0), ids)[-1]
    torch.testing.assert_close(driver.logits[0], expected, rtol=1e-4, atol=1e-4)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a model": ({"general.type": "model"}, "general.type model: only adapter"),
    "another method": ({"adapter.type": "ia3"}, "adapter.type ia3: only lora"),
    "another base": ({"architecture": "qwen3"}, "is for qwen3, and the model is a LlamaForCausalLM"),
    "rank too large": ({"rank": 32}, "set max-lora-rank to at least 32"),
    "alpha not finite": ({"alpha": float(np.inf)}, "alpha that is no number"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_adapter_is_refused_with_one_line(kind: str, tmp_path: Path) -> None:
    changes, message = BAD[kind]
    path = write_gguf_adapter(tmp_path / "a.gguf", checkpoint("llama"), **changes)
    with pytest.raises(ConfigurationError, match=message):
        read_adapter(read_files(path), modules(), MAX_RANK)


def test_a_broken_file_is_refused_without_a_path(tmp_path: Path) -> None:
    path = write_gguf_adapter(tmp_path / "a.gguf", checkpoint("llama"))
    whole = path.read_bytes()
    for data in (b"", b"GGUF", whole[:100], whole[:-100], b"x" + whole[1:]):
        path.write_bytes(data)
        with pytest.raises(ConfigurationError, match="the adapter") as refused:
            read_adapter(read_files(path), modules(), MAX_RANK)
        assert "/tmp" not in str(refused.value)
