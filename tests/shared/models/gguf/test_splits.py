"""The words that pre-tokenizers make of a text, by their names in GGUF files.

`python -m tests.families.gguf_vocabularies` compares ids with llama.cpp's, for its own vocabularies.
"""

import pytest
from tokenizers import Regex, pre_tokenizers

from pagewire.shared.models.gguf.splits import SPLITS

TEXTS = (
    "",
    "  a\n\n b\t",
    "don't SHOUT 12345 x=3.14; \u4f60\u597d abc\u00e9 \U0001f98a \u0417\u0434\u0440 1 22 333 4444\r\n",
)


def words(pre: str, text: str) -> list[str]:
    """The text in parts, as the expressions of a pre-tokenizer cut it."""
    cuts = [pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS[pre].expressions]
    return [word for word, _ in pre_tokenizers.Sequence(cuts).pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", SPLITS)
def test_words_are_the_whole_text(pre: str) -> None:
    for text in TEXTS:
        assert "".join(words(pre, text)) == text


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "it's 1234 x", ["it", "'s", " 1234", " x"]),
        ("smollm", "a 1234", ["a", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "IT'S 1234", ["IT", "'S", " ", "123", "4"]),
        ("qwen2", "IT'S 12", ["IT", "'S", " ", "1", "2"]),
        ("qwen35", "e\u0301a", ["e\u0301a"]),
        ("qwen2", "e\u0301a", ["e", "\u0301a"]),
        ("tekken", "getValue 12", ["get", "Value", " ", "1", "2"]),
        ("gpt-4o", "getValue's 1234", ["get", "Value's", " ", "123", "4"]),
        ("kimi-k2", "ab\u4f60\u597dcd", ["ab", "\u4f60\u597d", "cd"]),
        ("deepseek-v3", "12345 \u4f60\u597d", ["123", "45", " ", "\u4f60\u597d"]),
        ("deepseek-llm", "abc 12345\n", ["abc", " ", "12345", "\n"]),
        ("deepseek-coder", "abc 123", ["abc", " ", "1", "2", "3"]),
        ("falcon", "a=12345", ["a", "=", "123", "45"]),
        ("default", "a 12345", ["a", " ", "123", "45"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("afmoe", "12345", ["12", "345"]),
        ("superbpe", "1234567", ["1", "234", "567"]),
        ("bloom", "one, two", ["one", ",", " two"]),
        ("viking", "a12", ["a", "1", "2"]),
    ],
)
def test_words_split_as_in_the_model(pre: str, text: str, expected: list[str]) -> None:
    assert words(pre, text) == expected
