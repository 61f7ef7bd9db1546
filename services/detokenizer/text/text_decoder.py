"""Token ids to text, one token at a time."""

import codecs
from collections.abc import Sequence

from pagewire.services.detokenizer.text.vocabulary import Vocabulary


class TextDecoder:
    """The text of one completion, in the context of its prompt.

    The texts of all tokens, joined and followed by `flush`, are decode(prompt + generated) without the beginning that
    it shares with decode(prompt): a leading space stays, and a character that the prompt began belongs to the
    completion. Each text ends with a complete character; U+FFFD stands only for bytes that no later byte can complete.
    The cost of a token does not depend on the length of the text.

    A run of SentencePiece byte tokens decodes as SentencePiece does it: whole characters stay, and each other byte is
    one U+FFFD. The `tokenizers` library turns the whole run into U+FFFD if one byte of it is bad, which cannot be known
    before the run has ended.

    >>> from tokenizers import Tokenizer, decoders, models
    >>> tokenizer = Tokenizer(models.BPE({"Ã": 0, "©": 1, "!": 2}, []))  # the bytes of é, as byte-level BPE spells them
    >>> tokenizer.decoder = decoders.ByteLevel()
    >>> decoder = TextDecoder(Vocabulary(tokenizer), [], skip_special=True)
    >>> [decoder.push(token) for token in (0, 1, 2)]
    ['', 'é', '!']
    """

    __slots__ = ("_begins", "_borrowed", "_errors", "_open", "_pieces", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int], *, skip_special: bool) -> None:
        """`prompt`: ids of the prompt, or the last few of them; `skip_special`: whether special tokens have no text."""
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
        """Returns the index behind the last token that is whole characters: the tokens before it do not matter."""
        for index in range(len(prompt), 0, -1):
            piece = self._pieces[prompt[index - 1]]
            if piece and piece.__class__ is str:
                self._begins = False
                return index
        return 0

    def push(self, token: int) -> str:
        """Returns the text that `token` completes; empty for unknown ids."""
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
        """Returns the incomplete character as U+FFFD, at the end of the text or where a new character begins."""
        return self._feed(self._open, final=True)

    def _feed(self, data: bytes, *, final: bool) -> str:
        text, used = codecs.utf_8_decode(data, self._errors, final)
        self._open = data[used:]
        if self._borrowed and text:
            # The prompt began a character that no token completed: the prompt's text has its U+FFFD already.
            if text[0] == "\ufffd":
                text = text[self._borrowed :]
            self._borrowed = 0
        return text

    def _replaced(self, data: bytes) -> str:
        return codecs.utf_8_decode(data, self._errors, True)[0]
