import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.bundled_model.texts import HELD_OUT_SHARE, SHORTEST_DOCUMENT, clean, documents, load_books, split_book

STORY = "It was a long day, and nobody knew when it would end. " * 20


def book(stories: int) -> str:
    return "\n\n\n\n".join(f"Story {i}.\n\n{STORY}" for i in range(stories))


def test_prose_has_a_line_per_paragraph() -> None:
    wrapped = (
        "The first line of a paragraph that goes on for long,\nand its second one.\n\nThe next goes on for longer."
    )
    assert clean(wrapped) == wrapped.replace("long,\nand", "long, and")


@pytest.mark.parametrize(
    "verse",
    [
        "You are old, father William, the young man said, and your hair\n  has become very white",
        "How doth the little\ncrocodile\nimprove",
    ],
)
def test_verse_keeps_its_lines(verse: str) -> None:
    assert clean(verse).count("\n") == verse.count("\n")


def test_quotes_are_straight_and_markup_is_gone() -> None:
    assert clean("[Illustration: a hat] “It’s _mine_”, he said.") == '"It\'s mine", he said.'


@given(st.text())
def test_any_text_is_clean_afterwards(text: str) -> None:
    once = clean(text)
    assert once == once.strip()
    assert "\n\n\n" not in once
    assert "_" not in once


def test_stories_are_documents() -> None:
    assert [doc.split(".")[0] for doc in documents(book(3))] == ["Story 0", "Story 1", "Story 2"]


def test_a_short_piece_belongs_to_the_story_behind_it() -> None:
    stories = documents("CHAPTER ONE" + "\n\n\n\n" + STORY + "\n\n\n\n" + "The end")
    assert stories[0].startswith("CHAPTER ONE\n\nIt was")
    assert stories[1:] == ["The end"]
    assert len(stories[0]) >= SHORTEST_DOCUMENT


def test_whole_stories_are_held_out() -> None:
    parts = split_book(book(40))
    assert [doc.split(".")[0] for doc in parts.held_out] == ["Story 38", "Story 39"]
    assert parts.training + parts.held_out == documents(book(40))


def test_one_long_story_is_cut_between_paragraphs() -> None:
    paragraphs = [f"Paragraph {i} of a story that has no chapters and goes on and on." for i in range(200)]
    parts = split_book("\n\n".join(paragraphs))
    assert "\n\n".join([*parts.training, *parts.held_out]).split("\n\n") == paragraphs
    assert len(parts.held_out[0].split("\n\n")) == pytest.approx(200 * HELD_OUT_SHARE, abs=2)


def test_a_book_without_text_is_refused() -> None:
    with pytest.raises(ValueError, match="no text"):
        split_book(" \n\n ")


def test_of_every_book_about_a_twentieth_is_held_out() -> None:
    books = load_books()
    assert len(books) == 7
    for name, book in books.items():
        held_out = sum(map(len, book.held_out))
        assert held_out / (held_out + sum(map(len, book.training))) == pytest.approx(HELD_OUT_SHARE, abs=0.025), name
