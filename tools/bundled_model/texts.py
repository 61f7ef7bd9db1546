"""The books as documents: cleaned, split into stories and chapters, and with a held-out part."""

import lzma
import re
from pathlib import Path
from typing import NamedTuple

BOOKS = Path(__file__).resolve().parent / "books"
HELD_OUT_SHARE = 0.05
"""Share of a book's characters that is held out."""
SHORTEST_DOCUMENT = 600
"""Minimum characters of a document; a shorter one is joined to the next."""


class Book(NamedTuple):
    """The documents of a book."""

    training: list[str]
    held_out: list[str]


def clean(text: str) -> str:
    """Converts a book to plain text: straight quotes, no markup, and one line per paragraph.

    Verse keeps its lines. A paragraph counts as verse when a line after the first is indented, or when all its lines
    are short.
    """
    text = re.sub(r"^\[.*?\]\s*", "", text)
    text = text.translate(str.maketrans("‘’“”", "''\"\"", "_"))
    paragraphs = []
    for block in re.split(r"\n[ \t]*\n", text):
        raw = [line.rstrip() for line in block.split("\n") if line.strip()]
        lines = [re.sub(r"\s+", " ", line.strip()) for line in raw]
        if not lines:
            continue
        verse = any(line.startswith("  ") for line in raw[1:]) or all(len(line) < 50 for line in lines)
        paragraphs.append(("\n" if verse else " ").join(lines))
    return "\n\n".join(paragraphs)


def documents(book: str) -> list[str]:
    """Splits a book into stories or chapters, which are separated by three or more blank lines."""
    pieces: list[str] = []
    held = ""
    for part in re.split(r"\n{4,}", book):
        piece = clean(part)
        if not piece:
            continue
        piece = held + "\n\n" + piece if held else piece
        held = ""
        if len(piece) < SHORTEST_DOCUMENT:
            held = piece
        else:
            pieces.append(piece)
    if held:
        pieces.append(held)
    return pieces


def split_book(text: str) -> Book:
    """Holds out the last documents of a book, about 5 % of its characters.

    The cut is between two documents if one ends near that point, else between two paragraphs.

    Raises:
        ValueError: the book has no text.
    """
    docs = documents(text)
    total = sum(len(doc) for doc in docs)
    training_size = (1.0 - HELD_OUT_SHARE) * total
    size, best, best_gap = 0, -1, 0.02 * total
    for index, doc in enumerate(docs):
        if abs(size - training_size) < best_gap:
            best, best_gap = index, abs(size - training_size)
        size += len(doc)
    if best > 0:
        return Book(docs[:best], docs[best:])
    size = 0
    for index, doc in enumerate(docs):
        if size + len(doc) > training_size:
            cut = doc.index("\n\n", int(training_size - size))
            return Book([*docs[:index], doc[:cut]], [doc[cut:].strip(), *docs[index + 1 :]])
        size += len(doc)
    raise ValueError("the book has no text")


def load_books() -> dict[str, Book]:
    """Returns all books by name."""
    books = {}
    for path in sorted(BOOKS.glob("*.txt.xz")):
        with lzma.open(path, "rt", encoding="utf-8") as file:
            books[path.name.removesuffix(".txt.xz")] = split_book(file.read())
    return books
