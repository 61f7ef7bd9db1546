import codecs
import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from pagewire.services.detokenizer.text import text_decoder
from pagewire.services.detokenizer.text.text_decoder import TextDecoder
from pagewire.services.detokenizer.text.vocabulary import Vocabulary
from tests.support.tokenizers import NAMES, PHI_BYTE, texts, token_id, tokenizer, vocabulary, whole_text

GPT2_FIRST_BYTES = 256
"""gpt2's first ids are single bytes."""

names = st.sampled_from(NAMES)


def pieces(name: str, ids: list[int], prompt: list[int] | None = None, *, skip_special: bool = True) -> list[str]:
    """Text of each token, and what the end releases as the last entry."""
    decoder = TextDecoder(vocabulary(name), prompt or [], skip_special=skip_special)
    return [*map(decoder.push, ids), decoder.flush()]


def continuation(name: str, prompt: list[int], ids: list[int], *, skip_special: bool = True) -> str:
    """The definition: decode(prompt + ids) without what decode(prompt) has in common with it."""
    both = whole_text(name, prompt + ids, skip_special=skip_special)
    alone = whole_text(name, prompt, skip_special=skip_special)
    common = next((i for i, pair in enumerate(zip(both, alone, strict=False)) if len(set(pair)) > 1), len(alone))
    return both[common:]


@st.composite
def token_ids(draw: st.DrawFn, name: str) -> list[int]:
    """Any ids: half of them single bytes, so that characters are cut and broken; some are of no token."""
    size = tokenizer(name).get_vocab_size()
    first = PHI_BYTE if name == "phi-3-mini" else 0
    byte = st.integers(first, first + 255)
    return draw(st.lists(byte | st.integers(0, size + 3) | st.just(2**32 - 1), max_size=24))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("index", range(len(texts())))
def test_real_texts_come_out_as_the_library_decodes_them(name: str, index: int) -> None:
    ids = tokenizer(name).encode(texts()[index]).ids
    assert "".join(pieces(name, ids)) == tokenizer(name).decode(ids)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("index", range(20))
def test_any_split_into_prompt_and_completion_decodes_the_same(name: str, index: int) -> None:
    ids = tokenizer(name).encode(texts()[index]).ids
    for cut in range(len(ids) + 1):
        assert "".join(pieces(name, ids[cut:], ids[:cut])) == continuation(name, ids[:cut], ids[cut:])


@given(st.data(), names, st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_ids_behind_any_prompt_decode_as_their_continuation(
    data: st.DataObject, name: str, skip_special: bool
) -> None:
    ids = data.draw(token_ids(name))
    cut = data.draw(st.integers(0, len(ids)))
    decoded = "".join(pieces(name, ids[cut:], ids[:cut], skip_special=skip_special))
    assert decoded == continuation(name, ids[:cut], ids[cut:], skip_special=skip_special)


@given(names, st.text(max_size=20))
@settings(max_examples=150, deadline=None)
def test_no_piece_of_a_well_formed_text_holds_half_a_character(name: str, text: str) -> None:
    ids = tokenizer(name).encode(text, add_special_tokens=False).ids
    decoded = pieces(name, ids)
    assert "".join(decoded) == tokenizer(name).decode(ids)
    assert "".join(decoded).count("\ufffd") == text.count("\ufffd")
    assert decoded[-1] == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_character_comes_with_its_last_token(name: str) -> None:
    ids = tokenizer(name).encode("🦙🦙").ids
    decoded = pieces(name, ids)
    halfway = next(i for i in range(len(ids)) if "".join(decoded[: i + 1]).count("🦙") == 1)
    assert halfway < len(ids) - 1
    assert "".join(decoded[:halfway]).strip() == ""
    assert decoded[-2] == "🦙"


def test_an_open_character_is_replaced_once_the_stream_ends() -> None:
    ids = tokenizer("gpt2").encode("🦙").ids[:-1]
    assert pieces("gpt2", ids) == [""] * len(ids) + ["\ufffd"]
    llama = "🦙".encode()[:-1]
    assert pieces("phi-3-mini", [PHI_BYTE + byte for byte in llama]) == ["", "", "", "\ufffd" * 3]


def test_an_open_character_is_replaced_once_another_begins() -> None:
    open_one = tokenizer("gpt2").encode("🦙").ids[:-1]
    hello = tokenizer("gpt2").encode(" hello").ids
    assert "".join(pieces("gpt2", open_one + hello)) == "\ufffd hello"


def test_a_whole_character_before_a_bad_byte_stays() -> None:
    ids = [PHI_BYTE + byte for byte in "中".encode() + b"\x80"]
    assert pieces("phi-3-mini", ids) == ["", "", "中", "\ufffd", ""]


def test_a_leading_space_is_kept_behind_a_prompt() -> None:
    phi = tokenizer("phi-3-mini")
    prompt, hello = phi.encode("Well").ids, phi.encode("hello").ids
    assert "".join(pieces("phi-3-mini", hello, prompt)) == " hello"
    assert "".join(pieces("phi-3-mini", hello)) == "hello"


def test_a_prompt_of_nothing_but_skipped_tokens_is_no_text() -> None:
    begin = token_id("phi-3-mini", "<s>")
    hello = tokenizer("phi-3-mini").encode("hello").ids
    assert "".join(pieces("phi-3-mini", hello, [begin])) == "hello"
    assert "".join(pieces("phi-3-mini", hello, [begin], skip_special=False)) == " hello"


def test_a_character_that_the_prompt_began_belongs_to_the_completion() -> None:
    ids = tokenizer("gpt2").encode("🦙!").ids
    assert "".join(pieces("gpt2", ids[2:], ids[:2])) == "🦙!"


def test_a_prompts_unfinished_character_is_not_in_the_output() -> None:
    open_one = tokenizer("gpt2").encode("🦙").ids[:2]
    hello = tokenizer("gpt2").encode("hello").ids
    assert "".join(pieces("gpt2", hello, open_one)) == "hello"


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_are_skipped_per_stream(name: str) -> None:
    end = token_id(name, "<|endoftext|>")
    word = tokenizer(name).encode("word").ids
    assert "".join(pieces(name, [*word, end, *word])) == tokenizer(name).decode([*word, end, *word])
    shown = "".join(pieces(name, [*word, end, *word], skip_special=False))
    assert shown == tokenizer(name).decode([*word, end, *word], skip_special_tokens=False)
    assert "<|endoftext|>" in shown


@pytest.mark.parametrize("name", NAMES)
def test_ids_of_no_token_are_empty_and_leave_no_trace(name: str) -> None:
    words = tokenizer(name).encode("two words").ids
    size = len(vocabulary(name).pieces(skip_special=True))
    mixed = [x for word in words for x in (word, 10**6, 2**32 - 1)]
    assert "".join(pieces(name, mixed)) == "two words"
    assert len(vocabulary(name).pieces(skip_special=True)) <= size + len(words)


@pytest.mark.parametrize("decoder", [None, decoders.Metaspace(), decoders.WordPiece(cleanup=False)])
def test_decoders_of_other_kinds_decode_like_the_library(decoder: decoders.Decoder | None) -> None:
    words = {"▁one": 0, "▁two": 1, "##s": 2, "!": 3, "[UNK]": 4}
    other = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    if decoder is not None:
        other.decoder = decoder
    for seed in range(50):
        ids = random.Random(seed).choices(range(4), k=6)
        stream = TextDecoder(Vocabulary(other), [], skip_special=True)
        assert "".join(map(stream.push, ids)) + stream.flush() == other.decode(ids)


def test_a_token_decodes_few_bytes_however_long_the_text_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that never become a character are the worst case of decoders that decode again from the last good point."""
    sizes: list[int] = []

    def utf_8_decode(data: bytes, errors: str, final: bool) -> tuple[str, int]:
        sizes.append(len(data))
        return codecs.utf_8_decode(data, errors, final)

    decoder = TextDecoder(vocabulary("phi-3-mini"), [], skip_special=True)
    monkeypatch.setattr(text_decoder, "codecs", SimpleNamespace(utf_8_decode=utf_8_decode))
    for _ in range(1000):
        decoder.push(PHI_BYTE + 0x80)
    assert len(sizes) == 1000
    assert max(sizes) <= 4
