"""Token ids to text, one token at a time."""

import codecs
from collections.abc import Sequence

from pagewire.services.detokenizer.vocabulary import Vocabulary


class TextDecoder:
    """The text of one completion, in the context of its prompt.

    The pieces, joined and followed by `flush`, are decode(prompt + generated) without what decode(prompt) has in common
    with it: a leading space stays, and a character that the prompt began belongs to the completion. A piece ends with
    the last character that is complete; U+FFFD comes out only for bytes that cannot become a character any more. Each
    token costs the same, however long the text is.

    A run of SentencePiece byte tokens decodes as SentencePiece itself does it: its whole characters stay, and each
    other byte is one U+FFFD. The `tokenizers` library would turn a run with one bad byte into U+FFFD altogether, which
    nobody can know before the run has ended.
    """

    __slots__ = ("_begins", "_borrowed", "_errors", "_open", "_pieces", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int], *, skip_special: bool) -> None:
        """`prompt`: at least the last ids of the prompt."""
        self._vocabulary = vocabulary
        self._pieces = vocabulary.pieces(skip_special=skip_special)
        self._errors = vocabulary.errors
        self._open = b""
        self._begins = True
        self._borrowed = 0
        for token in prompt[self._settle(prompt) :]:
            self.push(token)
        self._borrowed = len(self._replaced(self._open))

    def _settle(self, prompt: Sequence[int]) -> int:
        """Where the last token ends that is text by itself: nothing before it matters to what follows."""
        for index in range(len(prompt), 0, -1):
            piece = self._pieces[prompt[index - 1]]
            if piece and piece.__class__ is str:
                self._begins = False
                return index
        return 0

    def push(self, token: int) -> str:
        """Text that `token` completes; ids of no token are empty."""
        piece = self._pieces[token]
        if piece.__class__ is str:
            if self._open:
                return self.flush() + piece if piece else ""
            if self._begins and piece:
                self._begins = False
                return self._vocabulary.first(token)
            return piece
        assert isinstance(piece, bytes)
        self._begins = False
        return self._feed(self._open + piece, final=False)

    def flush(self) -> str:
        """What is still open, as U+FFFD: the text ends here, or goes on with a new character."""
        return self._feed(self._open, final=True)

    def _feed(self, data: bytes, *, final: bool) -> str:
        text, used = codecs.utf_8_decode(data, self._errors, final)
        self._open = data[used:]
        if self._borrowed and text:
            # A character that the prompt began and nobody ended: its U+FFFD stand in the prompt's text already.
            if text[0] == "\ufffd":
                text = text[self._borrowed :]
            self._borrowed = 0
        return text

    def _replaced(self, data: bytes) -> str:
        return codecs.utf_8_decode(data, self._errors, True)[0]
