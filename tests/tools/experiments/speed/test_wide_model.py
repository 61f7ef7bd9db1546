"""The wide model that computes what a smaller one computes."""

from pathlib import Path

import pytest
import torch

from pagewire.bench._quality.transformers import load_model
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.tokenizer_files import load_tokenizer
from tests.support.checkpoints import checkpoint
from tools.experiments.speed import wide_model


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_a_wide_model_has_the_logits_of_the_small_one(family: str, tmp_path: Path) -> None:
    small = checkpoint(family)
    assert wide_model.main([str(tmp_path / "wide"), "--model", str(small), "--factor", "2"]) == 0
    ids = torch.arange(3, 40)[None]
    model, wide = load_model(small), wide_model.widened(load_model(small), 2)
    torch.testing.assert_close(wide(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)
    written = load_model(tmp_path / "wide")
    assert written.config.hidden_size == 2 * model.config.hidden_size
    assert written.num_parameters() > 2 * model.num_parameters()
    assert load_tokenizer(tmp_path / "wide").backend.get_vocab() == load_tokenizer(small).backend.get_vocab()


def test_another_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no model of the family Llama"):
        wide_model.main([str(tmp_path / "wide"), "--model", str(checkpoint("qwen3"))])
