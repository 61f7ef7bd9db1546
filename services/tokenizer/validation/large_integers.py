"""Integers in JSON schemas that the doubles of llguidance do not hold. Pure."""

import math
from collections.abc import Mapping
from typing import Any

from pagewire.services.tokenizer.validation.json_schemas import map_parts

EXACT = 2**53
"""Integers up to here are exact in llguidance, but not their neighbours, which it computes from exclusive bounds."""
MOST_DIGITS = 40
"""Digits of bounds that are exact: among larger ones, those of doubles, the last number of digits is left out."""
LOWER = ("minimum", "exclusiveMinimum")
UPPER = ("maximum", "exclusiveMaximum")


def is_large(schema: Mapping[str, Any]) -> bool:
    """Returns whether llguidance would round a number that a schema demands of its own values, not of their parts."""
    if any(has_large(schema.get(name)) for name in ("const", "enum")):
        return True
    bounds = {name: abs(schema[name]) for name in (*LOWER, *UPPER) if _is_number(schema.get(name))}
    return any(bound > EXACT or (bound == EXACT and "exclusive" in name) for name, bound in bounds.items())


def has_large(value: object) -> bool:
    """Returns whether a value has an integer that llguidance would round."""
    match value:
        case bool():
            return False
        case int():
            return abs(value) > EXACT
        case list():
            return any(map(has_large, value))
        case dict():
            return any(map(has_large, value.values()))
    return False


def interval(schema: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Returns the least and the largest integer within the bounds of a schema; None: there is no bound.

    >>> interval({"minimum": 0.5, "exclusiveMaximum": 2**64})
    (1, 18446744073709551615)
    """
    bounds = {name: schema[name] for name in (*LOWER, *UPPER) if _is_number(schema.get(name))}
    least = [math.ceil(bounds["minimum"])] if "minimum" in bounds else []
    least += [math.floor(bounds["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in bounds else []
    most = [math.floor(bounds["maximum"])] if "maximum" in bounds else []
    most += [math.ceil(bounds["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in bounds else []
    return max(least, default=None), min(most, default=None)


def clamped(schema: Any) -> Any:
    """Returns a schema whose large bounds are those of the integers that llguidance does not round: it demands more.

    >>> clamped({"type": "integer", "minimum": 0, "maximum": 2**64})
    {'type': 'integer', 'minimum': 0, 'maximum': 9007199254740992}
    """
    if isinstance(schema, list):
        return [clamped(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner: dict[str, Any] = map_parts(schema, clamped)
    for names, sign in ((LOWER, -1), (UPPER, 1)):
        if any(_is_number(schema.get(name)) and schema[name] * sign >= EXACT for name in names):
            inner = {name: value for name, value in inner.items() if name not in names}
            inner[names[0]] = sign * EXACT
    return inner


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def fractions(least: int | None, most: int | None) -> str:
    """Returns a regular expression of decimal fractions from `least` to `most`; empty: there are none.

    They are less than 2^53, so that the double next to one is between the bounds, too.

    >>> fractions(0, 3)
    '([0-2])[.][0-9]+'
    """
    below = EXACT - 1 if most is None else min(most, EXACT) - 1
    above = EXACT - 1 if least is None else min(-least, EXACT) - 1
    signed = [("", integers(max(0, least or 0), below)), ("-", integers(max(0, -(most or 0)), above))]
    return "|".join(f"{sign}({whole})[.][0-9]+" for sign, whole in signed if whole)


def integers(least: int | None, most: int | None) -> str:
    """Returns a regular expression of the integers from `least` to `most` in decimal; empty: there are none.

    None is no bound.

    >>> integers(-1, 42)
    '-1|[0-9]|([1-3][0-9]|4[0-2])'
    """
    alternatives = []
    if least is None or least < 0:
        nearest = 1 if most is None else max(1, -most)
        negatives = _magnitudes(nearest, None if least is None else -least)
        alternatives = [f"-{digits}" for digits in negatives]
    if most is None or most >= 0:
        alternatives += _magnitudes(max(0, least or 0), most)
    return "|".join(alternatives)


def _magnitudes(least: int, most: int | None) -> list[str]:
    """Returns expressions for the numbers of digits; beyond `MOST_DIGITS` the last ones are left out."""
    if most is not None and (digits := len(str(most))) > MOST_DIGITS + 1:
        longer = f"[1-9][0-9]{{{MOST_DIGITS},{digits - 2}}}"
        return [*_magnitudes(least, 10**MOST_DIGITS - 1), longer] if least < 10**MOST_DIGITS else []
    lengths = range(len(str(least)), len(str(least if most is None else most)) + 1)
    expressions = []
    for length in lengths:
        low = max(least, 10 ** (length - 1) if length > 1 else 0)
        high = 10**length - 1 if most is None else min(most, 10**length - 1)
        if low <= high:
            expressions.append(_digits(str(low), str(high)))
    return expressions if most is not None else [*expressions, f"[1-9][0-9]{{{len(str(least))},}}"]


def _digits(low: str, high: str) -> str:
    """Returns an expression of the numbers from `low` to `high`, which have equally many digits."""
    rest = len(low) - 1
    if not low:
        return ""
    if low == "0" * len(low) and high == "9" * len(high):
        return _any(len(low))
    if low[0] == high[0]:
        return low[0] + _digits(low[1:], high[1:])
    first, last, lowest, highest = int(low[0]), int(high[0]), [], []
    if low[1:] != "0" * rest:
        lowest, first = [low[0] + _digits(low[1:], "9" * rest)], first + 1
    if high[1:] != "9" * rest:
        highest, last = [high[0] + _digits("0" * rest, high[1:])], last - 1
    between = [(f"[{first}-{last}]" if first < last else str(first)) + _any(rest)] if first <= last else []
    parts = [*lowest, *between, *highest]
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"


def _any(count: int) -> str:
    return "[0-9]" * count if count < 2 else f"[0-9]{{{count}}}"
