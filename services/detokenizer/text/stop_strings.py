"""Finds stop strings in a text that comes piece by piece."""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopAutomaton:
    """Finds stop strings in a text. Source: Aho and Corasick, 1975.

    After each character, the automaton is in the state of the longest suffix of the text that begins a stop string.
    State 0 is the empty suffix.

    Attributes:
        depth: length of each state's suffix, in characters.
        beginnings: first characters of the stop strings.
        matched: index of the first stop string that ends in each state; -1: none.
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
        while (following := self._next[state].get(character)) is None and state:
            state = self._shorter[state]
        return following or 0

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
    """Returns the automaton of these stop strings. It is kept, as clients send the same ones again and again."""
    return StopAutomaton(stops)


class StopStrings:
    """Passes text on up to the first stop string, and holds back a suffix that may still become one.

    The stop string that is complete first ends the text; among several that end at one character, the first in the
    list. The cost of a character does not depend on the number and length of the stop strings.

    >>> stops = StopStrings(("END",), include=False)
    >>> stops.push("the E")
    ('the ', None)
    >>> stops.push("ND of it")
    ('', 'END')
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
