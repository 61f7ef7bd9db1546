"""The expressions of an adapter_config.json, each compiled once. They come from outside, and some take years."""

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import regex

from pagewire.shared.errors import ConfigurationError

N = TypeVar("N", int, float)
PATTERN_SECONDS = 0.1
"""Seconds that a search for a pattern may take."""
TOTAL_SECONDS = 10.0
"""Seconds of a core that all patterns of an adapter may take."""
MAX_PATTERN = 10_000
"""Characters of a pattern."""
MAX_REPEATS = 100_000
"""Product of the counts, such as `{3}`, in a pattern. The library writes out what they repeat, which no time limits."""
MAX_SHOWN = 100
"""Characters that an error shows of a pattern, and of a name."""
_COUNT = regex.compile(r"\{(?:\d*,)?(\d+)(?:,)?\}")
"""The highest count of a repetition."""
_NAME = regex.compile(r"[\w.]+")
"""A key that is a name. As an expression, its dots would stand for any character, which no module's name needs."""


class Expressions:
    """The expressions of one configuration, which share `TOTAL_SECONDS`."""

    def __init__(self) -> None:
        self._compiled: dict[str, Any] = {}
        self._seconds = 0.0

    def matches(self, expression: str, text: str) -> bool:
        """Returns whether an expression matches all of a text.

        Raises:
            ConfigurationError: it is no expression, or exceeds a limit.
        """
        return self._search(expression, "fullmatch", text) is not None

    def number(self, expression: str, text: str) -> int | None:
        """Returns the number that the last group of an expression finds at the beginning of a text; None: none.

        Raises:
            ConfigurationError: it is no expression, or exceeds a limit.
        """
        match = self._search(expression, "match", text)
        number = None if match is None else match[match.re.groups]
        return None if number is None else int(number)

    def _search(self, expression: str, method: str, text: str) -> Any:
        shown = f"adapter_config.json has {expression[:MAX_SHOWN]!r}"
        if self._seconds >= TOTAL_SECONDS:
            raise ConfigurationError("adapter_config.json has patterns that together take too long: simplify them")
        began = time.thread_time()
        try:
            compiled = self._compiled.get(expression)
            if compiled is None:
                compiled = self._compiled[expression] = _compile(expression, shown)
            return getattr(compiled, method)(text, timeout=PATTERN_SECONDS)
        except regex.error as error:
            raise ConfigurationError(f"{shown}, which is no expression: {error}") from error
        except RecursionError as error:
            raise ConfigurationError(f"{shown}, which is nested too deeply: simplify it") from error
        except TimeoutError as error:
            raise ConfigurationError(f"{shown}, which takes too long to match") from error
        finally:
            self._seconds += time.thread_time() - began


class ModuleNames:
    """The modules that a field names: an expression all of a module's name, the items of a list the end of it."""

    def __init__(self, names: list[str] | str, expressions: Expressions) -> None:
        self._expression = names if isinstance(names, str) else None
        self._ends = frozenset([] if isinstance(names, str) else names)
        self._expressions = expressions

    def __contains__(self, module: str) -> bool:
        if self._expression is not None:
            return self._expressions.matches(self._expression, module)
        return any(end in self._ends for end in _ends(module))


class PatternValues(Generic[N]):
    """The values of `rank_pattern` or `alpha_pattern`, whose keys are expressions of the ends of modules' names."""

    def __init__(self, values: Mapping[str, N], expressions: Expressions) -> None:
        self._expressions = expressions
        self._names: dict[str, tuple[int, N]] = {}  # with the place of each key
        self._others: list[tuple[int, str, N]] = []
        for place, (key, value) in enumerate(values.items()):
            if _NAME.fullmatch(key):
                self._names[key] = place, value
            else:
                self._others.append((place, rf"(.*\.)?({key})", value))

    def value(self, module: str, default: N) -> N:
        """Returns the value of the first key that matches; `default`: none does."""
        named = [self._names[end] for end in _ends(module) if end in self._names]
        first, value = min(named, default=(len(self._names) + len(self._others), default))
        for place, expression, other in self._others:
            if place > first:
                break
            if self._expressions.matches(expression, module):
                return other
        return value


def _ends(module: str) -> Iterator[str]:
    """Yields a module's name and all ends of it behind a dot.

    >>> [*_ends("model.layers.0")]
    ['model.layers.0', 'layers.0', '0']
    """
    while module:
        yield module
        module = module.partition(".")[2]


def _compile(expression: str, shown: str) -> Any:
    counts = (max(float(count), 1.0) for count in _COUNT.findall(expression[:MAX_PATTERN]))
    if len(expression) > MAX_PATTERN or math.prod(counts) > MAX_REPEATS:
        raise ConfigurationError(f"{shown}, which is too large for an expression: simplify it")
    return regex.compile(expression)
