"""Rewrites keywords of JSON schemas that llguidance lacks or rounds. Pure.

Each value of a rewritten schema fulfils the schema as it was sent.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from pagewire.services.tokenizer.validation.json_schemas import map_parts

EXACT = 2**53
"""Integers up to here are exact in llguidance, which computes with doubles."""
LARGEST = 2**63 - 1024
"""The largest double that is a signed integer of 64 bits: llguidance computes bounds with both."""
EVERY_DOUBLE = 1.79e308
"""Magnitude of bounds that every double keeps."""
_BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
"""Keywords of bounds, and the direction in which one gets stricter."""
_SAYS_NOTHING: Mapping[str, tuple[object, ...]] = {
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "minContains": (0,),
    "minItems": (0,),
    "minLength": (0,),
    "minProperties": (0,),
    "not": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "required": ([],),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
"""Values with which a keyword constrains nothing. null, which some generators write, is another one."""
_LOCAL = r"[A-Za-z0-9_'+\-]"
PATTERNS = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        rf"^({_LOCAL}+\.)*{_LOCAL}*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{{2,}}$"
    ),
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        r"^P(\d+W|(\d+Y(\d+M)?(\d+D)?|\d+M(\d+D)?|\d+D)(T(\d+H(\d+M)?(\d+([.,]\d+)?S)?|\d+M(\d+([.,]\d+)?S)?"
        r"|\d+([.,]\d+)?S))?|T(\d+H(\d+M)?(\d+([.,]\d+)?S)?|\d+M(\d+([.,]\d+)?S)?|\d+([.,]\d+)?S))$"
    ),
}
"""Patterns that zod writes, and equal ones without looking ahead, which llguidance cannot do."""


def simplified(schema: Any) -> Any:
    """Returns a schema without keywords that say nothing, and with equivalents of some that llguidance lacks.

    >>> simplified({"type": "object", "propertyNames": {"type": "string"}, "properties": {"a": {"not": {}}}})
    {'type': 'object', 'properties': {'a': False}}

    Raises:
        ValueError: a number cannot be kept exactly.
    """
    if isinstance(schema, list):
        return [simplified(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("not") == {} or schema.get("not") is True:
        return False
    kept = {name: value for name, value in schema.items() if not _says_nothing(name, value, schema)}
    for name in ("const", "enum"):
        _check_exact(kept.get(name), name)
    for name, direction in _BOUNDS.items():
        _bound(kept, name, direction)
    if isinstance(pattern := kept.get("pattern"), str):
        kept["pattern"] = PATTERNS.get(pattern, pattern)
    _name_properties(kept)
    inner: dict[str, Any] = map_parts(kept, simplified)
    return inner


def _says_nothing(name: str, value: object, schema: Mapping[str, Any]) -> bool:
    """Returns whether a keyword constrains nothing."""
    if value is None and name not in {"const", "default"}:
        return True
    if name == "uniqueItems" and value is True:
        return schema.get("maxItems") in {0, 1}
    return any(type(value) is type(nothing) and value == nothing for nothing in _SAYS_NOTHING.get(name, ()))


def _check_exact(value: object, name: str) -> None:
    """Raises ValueError if data holds an integer that llguidance would round."""
    match value:
        case bool():
            pass
        case int() if abs(value) > EXACT:
            raise ValueError(f"{name} has the integer {value}, beyond 2**53, where integers are not exact")
        case list():
            for each in value:
                _check_exact(each, name)
        case dict():
            for each in value.values():
                _check_exact(each, name)


def _bound(schema: dict[str, Any], name: str, direction: int) -> None:
    """Moves a bound inward to the next number that llguidance keeps, or drops it where every double is within it.

    Raises:
        ValueError: it excludes more than llguidance can express.
    """
    bound = schema.get(name)
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        return
    outward = -direction * bound > 0
    if outward and isinstance(bound, float) and abs(bound) >= EVERY_DOUBLE:
        del schema[name]
    elif abs(bound) > LARGEST and outward:
        schema[name] = -direction * LARGEST
    elif abs(bound) > LARGEST:
        raise ValueError(f"{name} is {bound}, and numbers beyond 64 bits are not supported")
    elif isinstance(bound, int) and abs(bound) > EXACT:
        schema[name] = _inward(bound, direction)


def _inward(bound: int, direction: int) -> int:
    """Returns the integer next to a bound that is a double, in the direction in which the bound gets stricter.

    >>> _inward(2**53 + 1, 1) - 2**53, _inward(2**53 + 1, -1) - 2**53
    (2, 0)
    """
    nearest = float(bound)
    if (nearest - bound) * direction < 0:
        nearest = math.nextafter(nearest, direction * math.inf)
    return int(nearest)


def _name_properties(schema: dict[str, Any]) -> None:
    """Replaces `propertyNames` by properties or patterns with the same names, if it can."""
    names = schema.get("propertyNames")
    if not isinstance(names, dict) or "patternProperties" in schema or names.get("type", "string") != "string":
        return
    constraints = names.keys() - {"type"}
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    if constraints in ({"enum"}, {"const"}):
        allowed = names["enum"] if "enum" in names else [names["const"]]
        if not isinstance(allowed, list) or not isinstance(properties, dict):
            return
        schema["properties"] = {name: properties.get(name, others) for name in allowed if isinstance(name, str)}
        schema["additionalProperties"] = False
    elif constraints == {"pattern"} and not properties:
        try:
            re.compile(names["pattern"])
        except (re.error, TypeError):
            return
        schema["patternProperties"] = {names["pattern"]: others}
        schema["additionalProperties"] = False
    else:
        return
    del schema["propertyNames"]
