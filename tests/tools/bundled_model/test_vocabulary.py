import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from pagewire.shared.models.model_folder import BUNDLED
from tools.bundled_model.vocabulary import EOS, end_of_text, train_tokenizer

TRAINED = train_tokenizer(["the cat sat on the mat, and the cat's hat was flat"] * 3, 275)


def test_a_vocabulary_has_the_requested_size_and_knows_its_texts() -> None:
    assert TRAINED.get_vocab_size() == 275
    assert len(TRAINED.encode(" the").ids) == 1
    assert len(TRAINED.encode(" zebra").ids) > 1


@pytest.mark.parametrize("tokenizer", [TRAINED, Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))])
def test_any_text_comes_back(tokenizer: Tokenizer) -> None:
    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def check(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text

    check()


def test_no_token_reaches_across_words_or_more_than_three_digits() -> None:
    tokenizer = train_tokenizer(["12345678 on the mat"] * 50, 400)
    tokens = tokenizer.encode("12345678 on the mat").tokens
    assert tokens == ["123", "456", "78", "Ġon", "Ġthe", "Ġmat"]


def test_the_end_of_text_is_one_token() -> None:
    assert TRAINED.encode(f"cat{EOS}").ids[-1] == end_of_text(TRAINED)


def test_a_tokenizer_without_it_is_refused() -> None:
    with pytest.raises(ValueError, match="no token"):
        end_of_text(Tokenizer(models.BPE()))
