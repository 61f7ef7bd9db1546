"""The configuration in a GGUF file, and the refusals."""

from pathlib import Path
from typing import Any

import pytest

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import eos_ids, max_model_len, read_config, resolve, revision, served_name
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import checkpoint
from tests.support.gguf_files import from_checkpoint

KEYS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "architectures",
    "tie_word_embeddings",
]


@pytest.mark.parametrize("name", ["llama", "llama-tied", "mistral", "qwen2", "qwen3", "llama-yarn", "llama-linear"])
def test_a_gguf_file_gives_the_fields_of_config_json(tmp_path: Path, name: str) -> None:
    ours, theirs = read_config(from_checkpoint(name, tmp_path / "m.gguf")), read_config(checkpoint(name))
    assert {key: ours[key] for key in KEYS} == {key: theirs[key] for key in KEYS}
    assert ours["rope_parameters"] == theirs["rope_parameters"]
    assert ours.get("sliding_window") == (theirs["sliding_window"] if name == "mistral" else None)


def test_end_tokens_are_the_named_one_and_those_of_llama_cpp(tmp_path: Path) -> None:
    path = from_checkpoint("llama", tmp_path / "m.gguf", metadata={"tokenizer.ggml.eot_token_id": 9})
    assert eos_ids(path) == {0, 9}
    assert set(read_config(path)["eos_token_id"]) == {0, 9}


def test_a_file_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = from_checkpoint("llama", tmp_path / "Tiny-1B.Q8_0.gguf", "Q8_0")
    monkeypatch.chdir(tmp_path)
    assert resolve("Tiny-1B.Q8_0.gguf") == path
    assert served_name(Settings(model=str(path))) == "Tiny-1B.Q8_0"
    assert max_model_len(Settings(), read_config(path)) == 256
    assert len(revision(path)) == 12
    with pytest.raises(ConfigurationError, match=r"there is no file nothing\.gguf"):
        resolve("nothing.gguf")


def test_a_split_model_has_one_name(tmp_path: Path) -> None:
    from_checkpoint("llama", tmp_path / "m.gguf", split=8)
    first = min(tmp_path.glob("*.gguf"))
    assert served_name(Settings(model=str(first))) == "m"


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.attention.value_length": 8}, "attention.value_length"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count"),
        ({"llama.attention.head_count": [4, 2]}, "layers that differ in llama.attention.head_count"),
        ({"llama.attention.head_count": "four"}, "no number llama.attention.head_count"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count"),
        ({"llama.rope.freq_base": "high"}, "llama.rope.freq_base"),
    ],
)
def test_an_unsupported_configuration_is_refused(tmp_path: Path, metadata: dict[str, Any], word: str) -> None:
    path = from_checkpoint("llama", tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(ConfigurationError, match=word) as caught:
        read_config(path)
    assert "\n" not in str(caught.value)


def test_an_unknown_architecture_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    path = from_checkpoint("llama", tmp_path / "m.gguf", metadata={"general.architecture": "gemma3"})
    with pytest.raises(ConfigurationError, match=r"gemma3, which .* these are: llama, qwen2, qwen3"):
        read_config(path)


def test_equal_per_layer_numbers_are_one_number(tmp_path: Path) -> None:
    path = from_checkpoint("llama", tmp_path / "m.gguf", metadata={"llama.feed_forward_length": [96, 96]})
    assert read_config(path)["intermediate_size"] == 96
