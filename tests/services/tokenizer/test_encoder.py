import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from pagewire.services.tokenizer.encoder import INLINE_CHARACTERS, Encoder, ToIds, to_ids
from pagewire.shared.models.model_folder import BUNDLED
from pagewire.shared.models.tokenizer_files import load_tokenizer
from tests.support.model_folders import model_folder
from tests.support.tokenizers import NAMES, texts, tokenizer

pytestmark = pytest.mark.anyio

LONG = "The little rabbit ran into the wood. " * (INLINE_CHARACTERS // 16)
"""More than is encoded on the loop."""


@pytest.fixture
def encoder(tmp_path: Path) -> Iterator[Encoder]:
    encoder = Encoder(load_tokenizer(model_folder(tmp_path / "m", begin="<|endoftext|>")).backend)
    encoder.prepared.result()
    yield encoder
    encoder.close()


def ids(text: str) -> list[int]:
    encoded: list[int] = load_tokenizer(BUNDLED).backend.encode(text).ids
    return encoded


class Recorder:
    """Encodes, and notes the threads, and the turns of the loop, in which it does."""

    def __init__(self, encode: ToIds) -> None:
        self._encode = encode
        self.threads: list[str] = []
        self.turn = 0
        self.turns: list[int] = []

    def __call__(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        self.threads.append(threading.current_thread().name)
        self.turns.append(self.turn)
        return self._encode(texts, special)


def recorded(encoder: Encoder) -> Recorder:
    recorder = Recorder(encoder._to_ids)
    encoder._to_ids = recorder
    return recorder


@pytest.mark.parametrize("text", ["", "x", "Once upon a time", "naïve 猫 🦊\n\n  ", LONG])
async def test_a_text_has_the_models_ids_behind_its_beginning(encoder: Encoder, text: str) -> None:
    assert await encoder.encode([text]) == [[0, *ids(text)]]


async def test_a_text_has_the_same_ids_before_the_encoder_is_prepared(tmp_path: Path) -> None:
    encoder = Encoder(load_tokenizer(model_folder(tmp_path / "m", begin="<|endoftext|>")).backend)
    before = await encoder.encode(["Once upon a time"])
    encoder.prepared.result()
    assert before == await encoder.encode(["Once upon a time"]) == [[0, *ids("Once upon a time")]]
    encoder.close()


async def test_texts_of_a_batch_are_independent(encoder: Encoder) -> None:
    texts = ["one", LONG, "", "two"]
    assert await encoder.encode(texts) == [[0, *ids(text)] for text in texts]


async def test_a_text_may_have_only_the_special_tokens_that_it_spells_out(encoder: Encoder) -> None:
    text = "<user>hi<|endoftext|>\n<assistant>"
    assert await encoder.encode([text, LONG], special=False) == [ids(text), ids(LONG)]
    assert await encoder.encode([text], special=False) == [ids(text)]
    assert 0 in ids("<|endoftext|>")


async def test_only_long_texts_change_the_thread(encoder: Encoder) -> None:
    recorder = recorded(encoder)
    main = threading.current_thread().name
    await encoder.encode(["x" * INLINE_CHARACTERS])
    await encoder.encode(["x" * INLINE_CHARACTERS, "x"])
    assert recorder.threads[0] == main
    assert all(name.startswith("encode") for name in recorder.threads[1:])


async def test_each_turn_of_the_loop_encodes_at_most_one_text(encoder: Encoder) -> None:
    recorder = recorded(encoder)

    loop = asyncio.get_running_loop()

    def count() -> None:
        recorder.turn += 1
        loop.call_soon(count)

    count()
    await asyncio.gather(*(encoder.encode([str(number)]) for number in range(10)))
    assert len(set(recorder.turns)) == len(recorder.turns) == 10


async def test_long_texts_encoded_at_once_do_not_disturb_each_other(encoder: Encoder) -> None:
    texts = [f"{LONG} {number}" for number in range(12)]
    recorder = recorded(encoder)

    encoded = await asyncio.gather(*(encoder.encode([text]) for text in texts))
    assert encoded == [[[0, *ids(text)]] for text in texts]
    assert all(name.startswith("encode") for name in recorder.threads)


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
    """The tokenizer whose ids are right."""
    if name == "bundled":
        bundled: Tokenizer = load_tokenizer(BUNDLED).backend
        return bundled
    if name in NAMES:
        return tokenizer(name)
    changed = Tokenizer.from_str(tokenizer("gpt2").to_str())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    match name:
        case "llama-3":
            changed.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), words])
            end = changed.token_to_id("<|endoftext|>")
            changed.post_processor = processors.TemplateProcessing(
                single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)]
            )
            changed.add_tokens([AddedToken("<|tool|>", special=True), AddedToken("<pad>", lstrip=True, rstrip=True)])
        case "qwen":
            one_digit = LLAMA_3.replace("{1,3}", "")
            changed.normalizer = normalizers.NFC()
            changed.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(one_digit), "isolated"), words])
            changed.add_tokens([AddedToken("tool", single_word=True)])
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            changed.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return changed


@cache
def fast(name: str) -> ToIds:
    with capture_logs() as lines:
        encode = to_ids(library(name))
    assert lines == []
    return encode


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
def test_long_repetitions_have_the_ids_of_the_models_own_library(name: str, piece: str) -> None:
    text = piece * 20_000
    assert fast(name)([text], True) == [library(name).encode(text).ids]


def test_texts_that_the_fast_library_cannot_encode_go_to_the_models_own() -> None:
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
    changed = Tokenizer.from_str(library("bundled").to_str())
    changed.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    return changed


@pytest.mark.parametrize("made", [lambda: library("bundled"), refused])
async def test_the_loop_goes_on_while_a_thread_encodes(made: Callable[[], Tokenizer]) -> None:
    """The method used must let other threads run: `Tokenizer.encode` would hold the interpreter all the time."""
    encode = to_ids(made())
    text = " ".join(f"rabbit{number:x}" for number in range(200_000))
    started = threading.Event()

    def work() -> int:
        started.set()
        return len(encode([text], True)[0])

    turns = 0
    task = asyncio.create_task(asyncio.to_thread(work))
    while not task.done():
        turns += started.is_set()
        await asyncio.sleep(0)
    assert await task > 200_000
    assert turns > 500
