"""The configuration in a GGUF file, and the refusals."""

from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import (
    eos_ids,
    max_model_len,
    read_config,
    read_generation_config,
    resolve,
    revision,
    served_name,
)
from pagewire.shared.models.tokenizer_files import load_tokenizer
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import checkpoint, tokenizer
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


def with_tokens(folder: Path, tokens: dict[int, tuple[str, TokenType]]) -> Path:
    """A file in which some tokens have another text and type."""
    vocabulary = tokenizer().backend_tokenizer
    texts = [vocabulary.id_to_token(id_) for id_ in range(vocabulary.get_vocab_size())]
    kinds = [TokenType.CONTROL if id_ == 0 else TokenType.NORMAL for id_ in range(len(texts))]
    for id_, (text, kind) in tokens.items():
        texts[id_], kinds[id_] = text, kind
    return from_checkpoint("llama", folder / "m.gguf", tokens=texts, kinds=kinds)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "mistral", "qwen2", "qwen3", "llama-yarn", "llama-linear"])
def test_a_gguf_file_gives_the_fields_of_config_json(tmp_path: Path, name: str) -> None:
    ours, theirs = read_config(from_checkpoint(name, tmp_path / "m.gguf")), read_config(checkpoint(name))
    assert {key: ours[key] for key in KEYS} == {key: theirs[key] for key in KEYS}
    assert ours["rope_parameters"] == theirs["rope_parameters"]
    assert ours.get("sliding_window") == (theirs["sliding_window"] if name == "mistral" else None)


def test_end_tokens_are_the_named_one_and_llama_cpps(tmp_path: Path) -> None:
    path = from_checkpoint("llama", tmp_path / "m.gguf", metadata={"tokenizer.ggml.eot_token_id": 9})
    assert eos_ids(path) == {0, 9}
    assert set(read_config(path)["eos_token_id"]) == {0, 9}


END = "<|im_end|>"


@pytest.mark.parametrize("kind", [TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED])
def test_a_token_with_the_text_of_an_end_is_one_whatever_its_type(tmp_path: Path, kind: TokenType) -> None:
    path = with_tokens(tmp_path, {7: (END, kind)})
    assert eos_ids(path) == {0, 7}
    assert load_tokenizer(path).backend.encode(f"one{END}").ids[-1] == 7


def test_a_token_that_only_ends_a_message_is_no_end_token(tmp_path: Path) -> None:
    """In the formats of gpt-oss and Solar, where a call or an answer follows."""
    texts = {7: "<|return|>", 8: "<|call|>", 9: "<|im_end|>"}
    path = with_tokens(tmp_path, {id_: (text, TokenType.CONTROL) for id_, text in texts.items()})
    assert eos_ids(path) == {7, 8, 9}


def test_tokens_of_code_models_that_end_a_file_are_ends(tmp_path: Path) -> None:
    path = with_tokens(tmp_path, {7: ("<|file_sep|>", TokenType.CONTROL), 8: ("<|fim_pad|>", TokenType.CONTROL)})
    assert eos_ids(path) == {0, 7, 8}


def test_a_file_recommends_how_to_sample(tmp_path: Path) -> None:
    values = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.5}
    path = from_checkpoint("llama", tmp_path / "m.gguf", metadata=values | {"general.sampling.sequence": "edskypmxt"})
    assert read_generation_config(path) == {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.5}


@pytest.mark.parametrize(("kind", "expected"), [("none", "default"), ("linear", "linear"), (None, "linear")])
def test_a_factor_scales_positions_unless_the_type_forbids_it(tmp_path: Path, kind: str | None, expected: str) -> None:
    metadata: dict[str, Any] = {"llama.rope.scaling.factor": 4.0}
    if kind is not None:
        metadata["llama.rope.scaling.type"] = kind
    path = from_checkpoint("llama", tmp_path / "m.gguf", metadata=metadata)
    assert read_config(path)["rope_parameters"]["rope_type"] == expected


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
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.attention.value_length": 8}, "attention.value_length"),
        ({"llama.attention.head_count": [4, 2]}, "layers that differ in llama.attention.head_count"),
        ({"llama.attention.head_count": "four"}, "no number llama.attention.head_count"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count"),
        ({"llama.rope.freq_base": "high"}, "llama.rope.freq_base"),
        ({"llama.block_count": 2**31 - 1}, "more layers than tensors"),
    ],
)
def test_an_unsupported_configuration_is_refused(tmp_path: Path, metadata: dict[str, Any], word: str) -> None:
    path = from_checkpoint("llama", tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(ConfigurationError, match=word) as caught:
        read_config(path)
    assert "\n" not in str(caught.value)


def test_equal_per_layer_numbers_are_one_number(tmp_path: Path) -> None:
    path = from_checkpoint("llama", tmp_path / "m.gguf", metadata={"llama.feed_forward_length": [96, 96]})
    assert read_config(path)["intermediate_size"] == 96
