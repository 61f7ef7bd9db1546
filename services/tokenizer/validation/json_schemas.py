"""Rewrites JSON schemas into ones that llguidance compiles. Pure."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

JsonSchema = dict[str, Any] | bool

TYPES = ("null", "boolean", "number", "string", "array", "object")
MAPS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords whose values are maps from names to schemas."""
DATA = frozenset({"const", "default", "enum", "example", "examples", "required"})
"""Keywords whose values are no schemas."""
MOST_ALTERNATIVES = 256
"""Alternatives of which every two are compared."""


def closed(schema: Any) -> Any:
    """Returns a schema in which objects have only the properties that it names, unless it says otherwise.

    >>> closed({"properties": {"a": {}}})
    {'properties': {'a': {}}, 'additionalProperties': False}
    """
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = map_parts(schema, closed)
    if isinstance(schema.get("properties"), dict) and not schema.keys() & {"additionalProperties", "patternProperties"}:
        inner["additionalProperties"] = False
    return inner


def stricter(schema: Any) -> Any:
    """Returns a schema with fewer of the keywords that llguidance lacks. Each of its values fulfils `schema` too.

    Properties that depend on another one are required even without it. Where a number of
    properties is required, the first ones are. Each alternative of a `oneOf` that llguidance could not tell from
    another one forbids a property that the other requires.
    """
    if isinstance(schema, list):
        return [stricter(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = map_parts(schema, stricter)
    _demand_dependencies(inner)
    _demand_number(inner)
    _separate(inner)
    return inner


def map_parts(schema: dict[str, Any], rewrite: Any) -> dict[str, Any]:
    """Returns a schema with its parts rewritten, also under unknown keywords, as references may lead there."""
    parts: dict[str, Any] = {}
    for name, value in schema.items():
        if name in MAPS and isinstance(value, dict):
            parts[name] = {key: rewrite(part) for key, part in value.items()}
        else:
            parts[name] = value if name in DATA else rewrite(value)
    return parts


def _demand_dependencies(schema: dict[str, Any]) -> None:
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        demands = schema.get(keyword)
        if not isinstance(demands, dict) or not all(isinstance(each, dict | list | bool) for each in demands.values()):
            continue
        del schema[keyword]
        for name, demand in demands.items():
            if not isinstance(demand, list):
                schema["allOf"] = [*schema.get("allOf", []), demand]
            elif schema.get("additionalProperties") is not False or schema.get("properties", {}).keys() >= set(demand):
                schema["required"] = _with(schema.get("required", []), demand)
            else:
                schema["properties"] = {**schema.get("properties", {}), name: False}


def _demand_number(schema: dict[str, Any]) -> None:
    least, properties = schema.get("minProperties"), schema.get("properties")
    if isinstance(least, int) and isinstance(properties, dict) and "maxProperties" not in schema:
        required = schema.get("required", [])
        others = [name for name in properties if name not in required and properties[name] is not False]
        required = _with(required, others[: max(0, least - len(required))])
        if len(required) >= least:
            del schema["minProperties"]
            schema["required"] = required


def _separate(schema: dict[str, Any]) -> None:
    """Replaces a `oneOf` by an `anyOf` whose alternatives exclude each other, if it can."""
    alternatives = schema.get("oneOf")
    if not isinstance(alternatives, list) or "anyOf" in schema or len(alternatives) > MOST_ALTERNATIVES:
        return
    shapes = [_shape(alternative) for alternative in alternatives]
    separate = []
    for index, alternative in enumerate(alternatives):
        overlapping = [
            other
            for other, shape in zip(alternatives, shapes, strict=True)
            if other is not alternative and not _disjoint(shapes[index], shape)
        ]
        if (alone := _excluding(alternative, overlapping, schema.get("required", []))) is not None:
            separate.append(alone)
    if separate:
        del schema["oneOf"]
        schema["anyOf"] = separate


def _excluding(schema: Any, others: Iterable[Any], required: list[str]) -> dict[str, Any] | None:
    """Returns a schema of values that fulfil none of `others`, or None. The parent schema requires `required`.

    `others` are the alternatives that may share a value with it.
    """
    if not isinstance(schema, dict):
        return None
    forbidden: dict[str, bool] = {}
    for other in others:
        if not isinstance(other, dict):
            return None
        needed = [*schema.get("required", []), *required]
        name = next((name for name in other.get("required", []) if name not in needed), None)
        if name is None or schema.get("type", "object") != "object" or "$ref" in schema:
            return None
        forbidden[name] = False
    if not forbidden:
        return schema
    return {**schema, "type": "object", "properties": {**schema.get("properties", {}), **forbidden}}


def exclusive(alternatives: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether no value can fulfil two schemas, as far as their types and enumerated values show it.

    >>> exclusive([{"const": 1}, {"enum": [2, 3]}]), exclusive([{"type": "integer"}, {"const": 2}])
    (True, False)
    """
    shapes = [_shape(alternative) for alternative in alternatives]
    enumerated = [shape.values for shape in shapes if shape.values is not None]
    if len(enumerated) == len(shapes) and sum(map(len, enumerated)) == len(set().union(*enumerated)):
        return True
    return len(shapes) <= MOST_ALTERNATIVES and all(_disjoint(one, other) for one, other in combinations(shapes, 2))


@dataclass(frozen=True, slots=True)
class _Shape:
    """What tells the values of a schema from those of another one."""

    kinds: frozenset[str] = frozenset(TYPES)
    """Types of its values."""
    values: frozenset[str] | None = None
    """JSON of its values; None: they are not enumerated."""
    is_object: bool = False
    """Whether all of its values are objects."""
    members: Mapping[str, "_Shape"] = field(default_factory=dict)
    """Shapes of its required properties."""


def _shape(schema: Any, *, members: bool = True) -> _Shape:
    """Returns the shape of a schema, with those of its required properties if they count as `members`."""
    if not isinstance(schema, dict):
        return _Shape()
    kinds = schema.get("type", TYPES)
    kinds = [kinds] if isinstance(kinds, str) else kinds
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    texts = None
    if isinstance(values, list):
        texts = frozenset(json.dumps(value, sort_keys=True).removesuffix(".0") for value in values)
    properties, required = schema.get("properties"), schema.get("required")
    shapes = {}
    if members and isinstance(properties, dict) and isinstance(required, list):
        shapes = {name: _shape(properties[name], members=False) for name in required if name in properties}
    numbers = frozenset("number" if kind == "integer" else kind for kind in kinds)
    return _Shape(numbers, texts, schema.get("type") == "object", shapes)


def _disjoint(one: _Shape, other: _Shape) -> bool:
    """Returns whether no value can have both shapes."""
    if _apart(one, other):
        return True
    if not one.is_object and not other.is_object:
        return False
    return any(_apart(shape, other.members[name]) for name, shape in one.members.items() if name in other.members)


def _apart(one: _Shape, other: _Shape) -> bool:
    """Returns whether two shapes have types or enumerate values, and have none in common."""
    if one.kinds.isdisjoint(other.kinds):
        return True
    return one.values is not None and other.values is not None and one.values.isdisjoint(other.values)


def _with(names: list[str], more: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*names, *more]))
