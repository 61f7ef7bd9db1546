"""A tokenizer from a GGUF file gives the ids of the tokenizer that it was made from, and those of transformers."""

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from pagewire.services.detokenizer.text.vocabulary import Vocabulary
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.gguf import tokenizer as gguf_tokenizer
from pagewire.shared.models.gguf.reader import GgufModel
from pagewire.shared.models.model_tokenizer import ModelTokenizer
from tests.support import tokenizers
from tests.support.checkpoints import checkpoint
from tests.support.gguf_files import add_byte_level, add_sentencepiece, finish
from tests.support.tokenizers import texts

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
HARD = [
    "",
    " ",
    "  two spaces before",
    "trailing  ",
    "a\n\n b\t\tc",
    "don't 12345 x=3.14",
    "ünï ﬁ Å e\u0301",
    "🦊👩‍👩‍👧‍👦",
]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load(path: Path) -> ModelTokenizer:
    return gguf_tokenizer.load_tokenizer(GgufModel.open(path))


def write_byte_level(path: Path, tokenizer: Tokenizer, pre: str, **metadata: Any) -> Path:
    writer = GGUFWriter(path, "llama")
    add_byte_level(writer, tokenizer, pre)
    writer.add_chat_template(TEMPLATE)
    for key, value in metadata.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    finish(writer)
    return path


def write_sentencepiece(path: Path, tokenizer: Tokenizer, **metadata: bool) -> Path:
    writer = GGUFWriter(path, "llama")
    add_sentencepiece(writer, tokenizer)
    for key, value in metadata.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    finish(writer)
    return path


@cache
def gpt2(pre: str) -> Tokenizer:
    """GPT-2's vocabulary behind the pre-tokenizer of another model."""
    reference = Tokenizer.from_str(tokenizers.tokenizer("gpt2").to_str())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        reference.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if pre == "llama-bpe":
        reference.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), byte_level]
        )
    if pre == "qwen2":
        reference.normalizer = normalizers.NFC()
        cut = pre_tokenizers.Split(Regex(LLAMA_3.replace("{1,3}", "")), "isolated")
        reference.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    return reference


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_ids_equal_the_original_tokenizers(tmp_path: Path, pre: str) -> None:
    loaded = load(write_byte_level(tmp_path / "m.gguf", gpt2(pre), pre, add_bos_token=False))
    for text in HARD + texts():
        assert loaded.backend.encode(text).ids == gpt2(pre).encode(text).ids


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "tekken"])
def test_byte_level_ids_equal_transformers(tmp_path: Path, pre: str) -> None:
    small = Tokenizer.from_file(str(checkpoint("llama") / "tokenizer.json"))  # transformers takes seconds for others
    path = write_byte_level(tmp_path / "m.gguf", small, pre, add_bos_token=False)
    loaded, theirs = load(path), AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in HARD + texts():
        assert loaded.backend.encode(text).ids == theirs.backend_tokenizer.encode(text).ids


def test_sentencepiece_ids_equal_the_original_tokenizers(tmp_path: Path) -> None:
    phi = tokenizers.tokenizer("phi-3-mini")
    loaded = load(write_sentencepiece(tmp_path / "m.gguf", phi, add_bos_token=False))
    for text in HARD + texts():
        assert loaded.backend.encode(text).ids == phi.encode(text).ids


def test_sentencepiece_ids_equal_transformers(tmp_path: Path) -> None:
    path = write_sentencepiece(tmp_path / "m.gguf", tokenizers.tokenizer("phi-3-mini"))
    loaded, theirs = load(path), AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    plain = [text for text in HARD + texts() if text.strip() == text and not text.startswith("<")]
    assert len(plain) > 20
    for text in plain:
        assert loaded.backend.encode(text).ids == theirs.backend_tokenizer.encode(text).ids


@pytest.mark.parametrize("kind", ["gpt2", "phi-3-mini"])
def test_decoded_ids_are_the_text(tmp_path: Path, kind: str) -> None:
    path, original = tmp_path / "m.gguf", tokenizers.tokenizer(kind)
    if kind == "gpt2":
        write_byte_level(path, original, "gpt-2")
    else:
        write_sentencepiece(path, original)
    loaded = load(path).backend
    pieces = Vocabulary(loaded).pieces(skip_special=False)
    theirs = Vocabulary(original).pieces(skip_special=False)
    assert [pieces[token] for token in range(32_000)] == [theirs[token] for token in range(32_000)]
    for text in texts():
        assert loaded.decode(loaded.encode(text, add_special_tokens=False).ids) == text


def test_special_tokens_and_the_template_are_read(tmp_path: Path) -> None:
    loaded = load(write_byte_level(tmp_path / "m.gguf", tokenizers.tokenizer("gpt2"), "gpt-2"))
    assert loaded.templates == {"default": TEMPLATE}
    assert loaded.backend.encode("a<|endoftext|>b").ids == [64, 50256, 65]
    assert loaded.backend.decode([64, 50256, 65]) == "ab"


def test_sentencepiece_begins_with_bos_unless_the_file_denies_it(tmp_path: Path) -> None:
    phi = tokenizers.tokenizer("phi-3-mini")
    with_bos = load(write_sentencepiece(tmp_path / "a.gguf", phi)).backend.encode("Hello").ids
    without = load(write_sentencepiece(tmp_path / "b.gguf", phi, add_bos_token=False)).backend.encode("Hello").ids
    ending = load(write_sentencepiece(tmp_path / "c.gguf", phi, add_eos_token=True)).backend.encode("Hello").ids
    assert with_bos == [1, *without]
    assert ending == [*with_bos, 2]
    bare = load(write_sentencepiece(tmp_path / "d.gguf", phi, add_space_prefix=False, add_bos_token=False)).backend
    assert bare.decode(bare.encode("Hello").ids) == "Hello"
    assert bare.encode("Hello").ids != without


def refusal(path: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    path = write_byte_level(tmp_path / "a.gguf", tokenizers.tokenizer("gpt2"), "no-such")
    assert "pre-tokenizer no-such is not supported; these are: a.x-4.0, afmoe" in refusal(path)
    writer = GGUFWriter(tmp_path / "b.gguf", "llama")
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list(["a"])
    finish(writer)
    assert "kind rwkv" in refusal(tmp_path / "b.gguf")


def test_a_broken_tokenizer_is_an_error_of_one_line(tmp_path: Path) -> None:
    def write(name: str, tokens: list[str], merges: list[str], kinds: list[int]) -> Path:
        writer = GGUFWriter(tmp_path / name, "llama")
        writer.add_tokenizer_model("gpt2")
        if tokens:
            writer.add_token_list(tokens)
            writer.add_token_types(kinds)
            writer.add_token_merges(merges)
        finish(writer)
        return tmp_path / name

    assert "has no tokenizer" in refusal(write("a.gguf", [], [], []))
    assert "is broken" in refusal(write("b.gguf", ["a", "b"], ["a c"], [1, 1]))
    assert "is broken" in refusal(write("c.gguf", ["a", "b"], ["ab"], [1, 1]))
    assert "3 token_type for 2 tokens" in refusal(write("d.gguf", ["a", "b"], ["a b"], [1, 1, 1]))


def test_torch_is_not_imported() -> None:
    modules = "pagewire.shared.models.gguf.tokenizer, pagewire.shared.models.model_folder"
    program = f"import sys, {modules}; print('torch' in sys.modules, 'gguf' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_file_without_a_pre_tokenizer_gets_that_of_llama_cpp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load(write_byte_level(tmp_path / "m.gguf", gpt2("gpt-2"), "default", add_bos_token=False))
    assert [loaded.backend.decode([id_]) for id_ in loaded.backend.encode("a 12345").ids][-2:] == ["123", "45"]
    assert "pre_tokenizer_missing" in capsys.readouterr().out


def test_named_templates_are_read(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    add_byte_level(writer, gpt2("gpt-2"), "gpt-2")
    writer.add_chat_template([{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools"}])
    finish(writer)
    assert load(tmp_path / "m.gguf").templates == {"default": TEMPLATE, "tool_use": "tools"}
