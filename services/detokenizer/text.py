"""Token ids to text, one token at a time, and stop strings in that text."""

import codecs
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from pagewire.shared.vocabulary import Vocabulary


class TextDecoder:
    """The text of one completion, in the context of its prompt.

    The texts of all tokens, joined and followed by `flush`, are decode(prompt + generated) without the beginning that
    it shares with decode(prompt): a leading space stays, and a character that the prompt began belongs to the
    completion. Each text ends with a complete character; U+FFFD stands only for bytes that no later byte can complete.
    The cost of a token does not depend on the length of the text.

    A run of SentencePiece byte tokens decodes as SentencePiece does it: whole characters stay, and each other byte is
    one U+FFFD. The `tokenizers` library turns the whole run into U+FFFD if one byte of it is bad, which cannot be known
    before the run has ended.
    """

    __slots__ = ("_begins", "_borrowed", "_errors", "_open", "_pieces", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int], *, skip_special: bool) -> None:
        """`prompt`: ids of the prompt, at least the last few of them."""
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
        """Returns the index behind the last token that is text by itself: earlier tokens do not matter."""
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
        """Returns the incomplete character as U+FFFD: the text ends here, or goes on with a new character."""
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


class StopAutomaton:
    """Finds stop strings in a text. Source: Aho and Corasick, 1975.

    After each character, the automaton is in the state of the longest suffix of the text that begins a stop string.
    State 0 is the empty suffix.

    Attributes:
        depth: length of each state's suffix, in characters.
        beginnings: first characters of the stop strings.
        matched: index of the first stop string, in the order given, that ends in each state; -1: none.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.beginnings = frozenset(stop[0] for stop in stops if stop)
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]
        self.depth = [0]
        self.matched = [-1]
        for index, stop in enumerate(stops):
            self._add(stop, index)
        self._link()

    def step(self, state: int, character: str) -> int:
        """Returns the state after one more character."""
        while (found := self._next[state].get(character)) is None and state:
            state = self._shorter[state]
        return found or 0

    def open(self, state: int) -> int:
        """Returns the longest suffix of `state` that more characters can still turn into a stop string."""
        while state and not self._next[state]:
            state = self._shorter[state]
        return state

    def _add(self, stop: str, index: int) -> None:
        state = 0
        for character in stop:
            following = self._next[state].setdefault(character, len(self.depth))
            if following == len(self.depth):
                self._next.append({})
                self._shorter.append(0)
                self.depth.append(self.depth[state] + 1)
                self.matched.append(-1)
            state = following
        if state and self.matched[state] < 0:
            self.matched[state] = index

    def _link(self) -> None:
        """Links each state to its longest proper suffix that is a state, shorter states first."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, following in self._next[state].items():
                self._shorter[following] = self.step(self._shorter[state], character)
                waiting.append(following)
            ending = [index for index in (self.matched[state], self.matched[self._shorter[state]]) if index >= 0]
            self.matched[state] = min(ending, default=-1)


@lru_cache(maxsize=256)
def automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """Returns the automaton of these stop strings; clients tend to send the same ones again and again."""
    return StopAutomaton(stops)


class StopStrings:
    """Passes text on up to the first stop string, and holds back what may still become one.

    The stop string that is complete first ends the text; of several that end at the same character, the one that comes
    first in the list. The cost of a character does not depend on the number and length of the stop strings.
    """

    __slots__ = ("_automaton", "_held", "_include", "_state", "_stops")

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        """`include`: whether the stop string stays in the text."""
        self._stops = stops
        self._include = include
        self._automaton = automaton(stops)
        self._state = 0
        self._held = ""

    def push(self, piece: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Returns the text that may be sent, and the stop string that ended the text, or None.

        A stop string that is complete while not `armed` is ordinary text. After the end, nothing may be pushed.
        """
        states, state = self._automaton, self._state
        if not state and states.beginnings.isdisjoint(piece):
            return piece, None
        for end, character in enumerate(piece, 1):
            state = states.step(state, character)
            if armed and (index := states.matched[state]) >= 0:
                stop = self._stops[index]
                text = self._held + piece[:end]
                self._held = ""
                return text if self._include else text[: -len(stop)], stop
        self._state = state = states.open(state)
        text = self._held + piece
        free = len(text) - states.depth[state]
        self._held = text[free:]
        return text[:free], None

    def flush(self) -> str:
        """Returns the text that is held back: the text ends without a stop string."""
        held, self._held = self._held, ""
        self._state = 0
        return held
