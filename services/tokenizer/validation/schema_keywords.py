"""Rewrites keywords of JSON schemas that llguidance lacks. Pure.

Each value of a rewritten schema fulfils the schema as it was sent.
"""

import re
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from itertools import combinations
from typing import Any

from pagewire.services.tokenizer.validation.json_schemas import map_parts
from pagewire.services.tokenizer.validation.schema_references import pointed, resource_of

FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
"""Formats that llguidance knows. JSON Schema lets a validator ignore any other."""
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
MOST_IN_SET = 6
"""Values of which all sets are enumerated."""
_PYTHON = {"string": str, "integer": int, "null": type(None)}
"""Python's types of enumerated values, by the type in their schema."""
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
HOSTNAME = rf"^(?=.{{1,253}}\.?$){_LABEL}(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{{0,61}}[0-9a-zA-Z])?)*\.?$"
"""zod's pattern of host names."""
MOST_CHARACTERS = 253
"""Length of a host name that its pattern allows with or without a dot at the end."""
_EMOJI = r"\p{Extended_Pictographic}\p{Emoji_Component}"
_PICTURE = r"\p{Emoji_Presentation}\u20E3"
_EMOJI_ALONE = r"\p{Extended_Pictographic}\p{Regional_Indicator}\u20E3"
_LOCAL = r"[A-Za-z0-9_'+\-]"
PATTERNS = {
    HOSTNAME: rf"^{_LABEL}(?:\.{_LABEL})*\.?$",
    rf"^(?=[\s\S]*[{_EMOJI_ALONE}])[{_EMOJI}]+$": (
        rf"^[{_PICTURE}\p{{Emoji_Component}}]*[{_PICTURE}][{_PICTURE}\p{{Emoji_Component}}]*$"
    ),
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        rf"^({_LOCAL}+\.)*{_LOCAL}*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{{2,}}$"
    ),
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        r"^P(\d+W|(\d+Y(\d+M)?(\d+D)?|\d+M(\d+D)?|\d+D)(T(\d+H(\d+M)?(\d+([.,]\d+)?S)?|\d+M(\d+([.,]\d+)?S)?"
        r"|\d+([.,]\d+)?S))?|T(\d+H(\d+M)?(\d+([.,]\d+)?S)?|\d+M(\d+([.,]\d+)?S)?|\d+([.,]\d+)?S))$"
    ),
}
"""Patterns that zod writes, and others without looking ahead, which llguidance cannot do. They match the same texts,
but of emoji only those that every version of Unicode has."""


def simplified(schema: Any, resource: Mapping[str, Any] | None = None) -> Any:
    """Returns a schema without keywords that say nothing, and with equivalents of some that llguidance lacks.

    >>> simplified({"type": "object", "propertyNames": {"type": "string"}, "properties": {"a": {"not": {}}}})
    {'type': 'object', 'properties': {'a': False}}

    Args:
        schema: the whole schema, or a part of it.
        resource: what references in a part are relative to.
    """
    if isinstance(schema, list):
        return [simplified(part, resource) for part in schema]
    if not isinstance(schema, dict):
        return schema
    resource = resource_of(schema, schema if resource is None else resource)
    if schema.get("not") == {} or schema.get("not") is True:
        return False
    kept = {name: value for name, value in schema.items() if not _says_nothing(name, value, schema)}
    if isinstance(pattern := kept.get("pattern"), str):
        kept["pattern"] = PATTERNS.get(pattern, pattern)
        if pattern == HOSTNAME:
            kept["maxLength"] = min(MOST_CHARACTERS, kept.get("maxLength", MOST_CHARACTERS))
    _name_properties(kept, resource)
    _enumerate_sets(kept, resource)
    inner: dict[str, Any] = map_parts(kept, lambda part: simplified(part, resource))
    return inner


def _says_nothing(name: str, value: object, schema: Mapping[str, Any]) -> bool:
    """Returns whether a keyword constrains nothing."""
    if value is None and name not in {"const", "default"}:
        return True
    if name == "format" and isinstance(value, str):
        return value not in FORMATS
    if name == "uniqueItems" and value is True:
        return schema.get("maxItems") in {0, 1}
    return any(type(value) is type(nothing) and value == nothing for nothing in _SAYS_NOTHING.get(name, ()))


def _enumerate_sets(schema: dict[str, Any], resource: Mapping[str, Any]) -> None:
    """Replaces `uniqueItems` of a few enumerated values by all sets of them, in the order of the schema."""
    items = _dereferenced(schema.get("items"), resource)
    if schema.get("uniqueItems") is not True or not isinstance(items, dict) or {"enum", "const"} & schema.keys():
        return
    values = [items["const"]] if "const" in items else items.get("enum")
    if not isinstance(values, list) or len(values) > MOST_IN_SET or len(set(map(repr, values))) < len(values):
        return
    if items.keys() - {"const", "description", "enum", "title", "type"} or schema.keys() & {"contains", "prefixItems"}:
        return
    if "type" in items and not {type(value) for value in values} <= _python_types(items["type"]):
        return
    least, most = schema.pop("minItems", 0), schema.pop("maxItems", len(values))
    sizes = [size for size in range(len(values) + 1) if least <= size <= most]
    del schema["uniqueItems"], schema["items"]
    schema["enum"] = [list(some) for size in sizes for some in combinations(values, size)]


def _python_types(kinds: str | Sequence[str]) -> Set[type]:
    """Returns Python's types of values, by one or several types of a schema, as far as `_PYTHON` has them."""
    return {_PYTHON[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind in _PYTHON}


def _dereferenced(schema: Any, resource: Mapping[str, Any]) -> Any:
    """Returns the schema that a reference without other keywords leads to, or the schema itself."""
    if isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
        with suppress(LookupError):
            return pointed(reference, resource)[0]
    return schema


def _name_properties(schema: dict[str, Any], resource: Mapping[str, Any]) -> None:
    """Replaces `propertyNames` by properties or patterns with the same names, if it can."""
    names = _dereferenced(schema.get("propertyNames"), resource)
    if not isinstance(names, dict) or "patternProperties" in schema or names.get("type", "string") != "string":
        return
    constraints = names.keys() - {"type", "title", "description"}
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
