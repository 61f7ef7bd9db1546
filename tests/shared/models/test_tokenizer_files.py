import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.model_folder import BUNDLED
from pagewire.shared.models.tokenizer_files import load_tokenizer
from tests.support.model_folders import SIMPLE_TEMPLATE, change, model_folder


def test_the_bundled_tokenizer_decodes_its_own_ids() -> None:
    tokenizer = load_tokenizer(BUNDLED).backend
    text = "Once upon a time, naïve 猫 🦊\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_template_file_beside_the_tokenizer_is_found(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", template=SIMPLE_TEMPLATE)
    assert load_tokenizer(folder).templates == {"default": SIMPLE_TEMPLATE}


def test_a_template_in_the_configuration_is_found(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    change(folder / "tokenizer_config.json", chat_template=SIMPLE_TEMPLATE)
    assert load_tokenizer(folder).templates == {"default": SIMPLE_TEMPLATE}


def test_truncation_and_padding_in_the_file_are_off(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    tokenizer = load_tokenizer(folder).backend
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert 3 < len(load_tokenizer(folder).backend.encode("one two three four five").ids) != 9


TOKEN = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "an ordinary token becomes special": {"pad_token": "the"},
    "special tokens that are new": {"bos_token": "<s>", "extra_special_tokens": ["<x>", "<y>"]},
    "by both names": {"extra_special_tokens": ["<x>"], "additional_special_tokens": ["<y>", "the"]},
    "by both names, one with names": {
        "extra_special_tokens": {"audio_token": "<audio>"},
        "additional_special_tokens": ["<x>"],
    },
    "by the older name": {"additional_special_tokens": ["<x>", "the"]},
    "with names of the model's own": {"image_token": "<image>", "extra_special_tokens": {"audio_token": "<audio>"}},
    "with properties": {"mask_token": TOKEN | {"__type": "AddedToken", "content": "<mask>", "lstrip": True}},
    "listed with new properties": {
        "added_tokens_decoder": {
            "1": TOKEN | {"content": "<|endoftext|>", "special": True, "rstrip": True},
            "900000": TOKEN | {"content": "<late>", "special": False},
            "800000": TOKEN | {"content": "<s>", "special": False},
        },
        "bos_token": "<s>",
    },
    "special tokens are split": {"split_special_tokens": True},
    "flags of slow tokenizers": {"add_bos_token": True, "add_eos_token": True},
}
TEXTS = [
    "the <s>one<mask> <x> <|endoftext|> the<image>end<late>",
    "a  <y>b <audio>",
    "",
    " naïve 猫 🦊\n",
    "The the<|endoftext|> x",
]


@pytest.mark.parametrize("changes", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_ids_and_special_tokens_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = model_folder(tmp_path / "m", begin="<|endoftext|>")
    change(folder / "tokenizer_config.json", **changes)
    ours, theirs = load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours.special == theirs.special_tokens_map
    assert ours.backend.get_added_tokens_decoder() == theirs.added_tokens_decoder
    for text in TEXTS:
        ids = ours.backend.encode(text).ids
        assert ids == theirs.backend_tokenizer.encode(text).ids
        assert ours.backend.decode(ids) == theirs.backend_tokenizer.decode(ids)


def test_special_tokens_are_read_from_a_file_of_their_own(tmp_path: Path) -> None:
    """As older versions of transformers write them."""
    folder = model_folder(tmp_path / "m")
    special = {"bos_token": TOKEN | {"content": "<s>"}, "pad_token": "the", "additional_special_tokens": ["<x>"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    ours, theirs = load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours.special == theirs.special_tokens_map
    assert ours.backend.get_added_tokens_decoder() == theirs.added_tokens_decoder


def test_the_object_of_transformers_encodes_alike(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", template=SIMPLE_TEMPLATE)
    ours, theirs = load_tokenizer(folder).to_transformers(), PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)
    assert ours.special_tokens_map == theirs.special_tokens_map


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def empty(path: Path) -> None:
    path.write_text("{}")


def binary(path: Path) -> None:
    path.write_bytes(b"\xff\x00\x01")


@pytest.mark.parametrize("harm", [remove, cut, empty, binary])
def test_a_broken_tokenizer_is_an_error_of_one_line(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    folder = model_folder(tmp_path / "m")
    harm(folder / "tokenizer.json")
    with pytest.raises(ConfigurationError) as caught:
        load_tokenizer(folder)
    assert "tokenizer" in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_configuration_is_an_error_of_one_line(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    cut(folder / "tokenizer_config.json")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigurationError) as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("service", ["tokenizer", "detokenizer"])
def test_the_service_starts_without_slow_imports(service: str) -> None:
    program = (
        f"import sys, pagewire.services.{service}.service, pagewire.shared.models.model_folder as m;"
        "from pagewire.shared.models.tokenizer_files import load_tokenizer;"
        "load_tokenizer(m.BUNDLED); print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("prefix", [True, False])
def test_a_space_before_the_text_is_that_of_transformers(tmp_path: Path, kind: str, *, prefix: bool) -> None:
    folder = model_folder(tmp_path / "m", begin="<|endoftext|>")
    tokenizer = load_tokenizer(folder).backend
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    change(folder / "tokenizer_config.json", tokenizer_class=kind, add_prefix_space=prefix)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.backend.encode(text, add_special_tokens=False).ids
        assert ids == theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids
