"""Model folders without weights."""

from pathlib import Path

import pytest

from pagewire.bench.shapes import SHAPES, main, write_folder
from pagewire.shared.models.model_folder import eos_ids, read_config
from pagewire.shared.models.tokenizer_files import load_tokenizer


@pytest.mark.parametrize("name", SHAPES)
def test_a_folder_has_configuration_and_tokenizer(name: str, tmp_path: Path) -> None:
    write_folder(name, tmp_path / "new")
    config = read_config(tmp_path / "new")
    assert config["hidden_size"] == SHAPES[name]["hidden_size"]
    tokenizer = load_tokenizer(tmp_path / "new").to_transformers()
    assert eos_ids(tmp_path / "new") == {tokenizer.eos_token_id}
    assert len(tokenizer) <= config["vocab_size"]


def test_the_command_writes_a_folder_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["qwen3-0.6b", str(tmp_path)]) == 0
    assert "qwen3-0.6b without weights" in capsys.readouterr().out


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gpt-9", str(tmp_path)])
    assert "llama-3-70b" in capsys.readouterr().err
