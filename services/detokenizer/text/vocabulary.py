"""The text that each token adds to a text, for any tokenizer of the `tokenizers` library."""

import codecs
import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from tokenizers import Tokenizer

Piece = str | bytes
"""Whole characters as text, or bytes of a character that other tokens complete."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    """Returns one U+FFFD per invalid byte, as SentencePiece decodes byte tokens."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("pagewire.replace_each", _replace_each)


class Spelling(NamedTuple):
    """A token alone."""

    text: str
    broken: bytes = b""
    """Bytes of a token with a part of a character; empty: the text says it all."""


Spell = Callable[[int], Spelling]
"""Returns the spelling of a token id."""


class Vocabulary:
    """The pieces of one tokenizer, each computed on its first use and kept.

    Byte-level BPE (GPT-2 and most models since) spells bytes as printable characters. SentencePiece vocabularies have
    byte tokens `<0x..>` beside ordinary ones. With any other tokenizer, the piece of a token is the text that it adds
    after another token.

    Attributes:
        errors: codec error handler for invalid bytes: byte-level BPE writes one U+FFFD for each maximal part of an
            ill-formed sequence (Unicode 3.9), SentencePiece one per byte.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = _decoder_kinds(tokenizer)
        self._byte_level = _byte_alphabet() if "ByteLevel" in kinds else {}
        self._byte_fallback = "ByteFallback" in kinds
        self.errors = "pagewire.replace_each" if self._byte_fallback else "replace"
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token.content for token in added.values() if token.special}
        self._anchor = self._find_anchor()
        self._kept: dict[int, Piece] = _Table(self, skip_special=False)
        self._skipped: dict[int, Piece] = _Table(self, skip_special=True)

    def pieces(self, *, skip_special: bool) -> dict[int, Piece]:
        """Returns the piece of each token id; empty for unknown ids, and with `skip_special` for special tokens."""
        return self._skipped if skip_special else self._kept

    def first(self, token: int) -> str:
        """Returns the text of a token at the beginning of a text, where some decoders drop a leading space."""
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def spell(self, token: int) -> "Spelling":
        """Returns the text of a token alone: special tokens are spelled out, broken characters are U+FFFD."""
        piece = self._kept[token]
        return Spelling(piece) if isinstance(piece, str) else Spelling(piece.decode(errors=self.errors), piece)

    def find(self, token: int, *, skip_special: bool) -> Piece | None:
        """Returns the piece of `token` inside a text, or None if there is no such token."""
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return None
        if skip_special and name in self._special:
            return ""
        if self._byte_level:
            return _complete(_spelled_bytes(name, self._byte_level))
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(name)):
            return _complete(bytes([int(match[1], 16)]))
        before, both = self._decode(self._anchor), self._decode([*self._anchor, token])
        return both[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def _find_anchor(self) -> list[int]:
        """Returns an ordinary token, after which the text that other tokens add can be determined."""
        for token in range(self._tokenizer.get_vocab_size()):
            name = self._tokenizer.id_to_token(token)
            if name and name not in self._special and not _BYTE_TOKEN.fullmatch(name) and self._decode([token]).strip():
                return [token]
        return []


class _Table(dict[int, Piece]):
    """A cache of pieces. Unknown ids are not cached, so that the table stays as small as the vocabulary."""

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._skip_special = skip_special

    def __missing__(self, token: int) -> Piece:
        piece = self._vocabulary.find(token, skip_special=self._skip_special)
        if piece is None:
            return ""
        self[token] = piece
        return piece


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    """Returns the names of the steps of the tokenizer's decoder."""
    if tokenizer.decoder is None:
        return set()
    state = json.loads(tokenizer.decoder.__getstate__())
    return {part["type"] for part in state.get("decoders", [state])}


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Returns the byte of each character of GPT-2's alphabet: printable Latin-1 is itself, the rest follows U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _spelled_bytes(name: str, alphabet: dict[str, int]) -> bytes:
    """Returns the bytes of a byte-level token; an added token with other characters is its own text."""
    spelled = [alphabet.get(character) for character in name]
    return name.encode() if None in spelled else bytes(byte for byte in spelled if byte is not None)


def _complete(data: bytes) -> Piece:
    """Returns the text of `data` if it consists of whole characters, else `data`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
