import asyncio
import threading
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from pagewire.services.tokenizer.load import load_tokenizer
from pagewire.services.tokenizer.token_ids import ToIds, to_ids
from pagewire.shared.model_folder import BUNDLED
from tests.support.tokenizers import NAMES, texts, tokenizer

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FAST = (*NAMES, "bundled", "llama-3", "qwen", "smollm")
"""Tokenizers that the fast library knows. The last three are GPT-2's words behind those models' rules."""
TOKENS = ["<|endoftext|>", "<s>", "<|user|>", "<|tool|>", "<pad>", "tool", "▁", "Ġ", "<0x41>"]
PIECES = ["'S", "'ll", "\r\n", "\u3000", "\u00a0", "\ufeff", "e\u0301", "ﬁ", "가", "\u1100\u1161", "\u1c89", "🏳️‍🌈"]

written = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        st.text("ab A0 \n\t'_", max_size=30),
        st.sampled_from(TOKENS + PIECES),
        st.sampled_from(texts()).flatmap(lambda text: st.integers(0, len(text)).map(lambda at: text[at : at + 80])),
    ),
    max_size=8,
).map("".join)


@cache
def library(name: str) -> Tokenizer:
    """Whose ids are right."""
    if name == "bundled":
        bundled: Tokenizer = load_tokenizer(BUNDLED).backend_tokenizer
        return bundled
    if name in NAMES:
        return tokenizer(name)
    made = Tokenizer.from_str(tokenizer("gpt2").to_str())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    match name:
        case "llama-3":
            made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), words])
            end = made.token_to_id("<|endoftext|>")
            made.post_processor = processors.TemplateProcessing(
                single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)]
            )
            made.add_tokens([AddedToken("<|tool|>", special=True), AddedToken("<pad>", lstrip=True, rstrip=True)])
        case "qwen":
            one_digit = LLAMA_3.replace("{1,3}", "")
            made.normalizer = normalizers.NFC()
            made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(one_digit), "isolated"), words])
            made.add_tokens([AddedToken("tool", single_word=True)])
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return made


@cache
def fast(name: str) -> ToIds:
    with capture_logs() as lines:
        made = to_ids(library(name))
    assert lines == []
    return made


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("special", [True, False])
def test_hard_texts_have_the_ids_of_the_models_own_library(name: str, *, special: bool) -> None:
    expected = [library(name).encode(text, add_special_tokens=special).ids for text in texts()]
    assert fast(name)(texts(), special) == expected


@pytest.mark.parametrize("name", FAST)
@settings(deadline=None)
@given(text=written, special=st.booleans())
def test_any_text_has_the_ids_of_the_models_own_library(name: str, text: str, *, special: bool) -> None:
    assert fast(name)([text], special) == [library(name).encode(text, add_special_tokens=special).ids]


@pytest.mark.parametrize("piece", ["a", " ", "\n", " \n", "'", "(", "7", "e\u0301", "猫", "<|", "ab "])
@pytest.mark.parametrize("name", FAST)
def test_long_monotony_has_them_too(name: str, piece: str) -> None:
    text = piece * 20_000
    assert fast(name)([text], True) == [library(name).encode(text).ids]


def test_what_the_fast_library_refuses_is_left_to_the_models_own_and_said() -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "rabbit": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 0)])
    with capture_logs() as lines:
        encode = to_ids(words)
    assert [(line["event"], line["library"]) for line in lines] == [("encoding_takes_longer", "tokenizers")]
    assert "Whitespace" in lines[0]["reason"]
    assert encode(["the rabbit ran", "", "rabbit"], True) == [[0, 1, 2, 0], [0], [0, 2]]
    assert encode(["the rabbit ran"], False) == [[1, 2, 0]]


def refused() -> Tokenizer:
    """A tokenizer that is left to its own library, with the words of the bundled one."""
    made = Tokenizer.from_str(library("bundled").to_str())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    return made


@pytest.mark.parametrize("made", [lambda: library("bundled"), refused])
def test_the_loop_goes_on_while_a_thread_encodes(made: Callable[[], Tokenizer]) -> None:
    """The method used must let other threads run: `Tokenizer.encode` would hold the interpreter all the time."""
    encode = to_ids(made())
    text = " ".join(f"rabbit{number:x}" for number in range(200_000))
    started = threading.Event()

    def work() -> int:
        started.set()
        return len(encode([text], True)[0])

    async def main() -> int:
        turns = 0
        task = asyncio.create_task(asyncio.to_thread(work))
        while not task.done():
            turns += started.is_set()
            await asyncio.sleep(0)
        assert await task > 200_000
        return turns

    assert asyncio.run(main()) > 500
