"""Rewrites JSON schemas into ones that llguidance compiles. Pure."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

JsonSchema = dict[str, Any] | bool

TYPES = ("null", "boolean", "number", "string", "array", "object")
MAPS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords whose values are maps from names to schemas."""
DATA = frozenset({"const", "default", "enum", "example", "examples", "required"})
"""Keywords whose values are no schemas."""


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
    if not isinstance(alternatives, list) or "anyOf" in schema:
        return
    separate = []
    for alternative in alternatives:
        others = [other for other in alternatives if other is not alternative]
        if (alone := _excluding(alternative, others, schema.get("required", []))) is not None:
            separate.append(alone)
    if separate:
        del schema["oneOf"]
        schema["anyOf"] = separate


def _excluding(schema: Any, others: Iterable[Any], required: list[str]) -> dict[str, Any] | None:
    """Returns a schema of values that fulfil none of `others`, or None. The parent schema requires `required`."""
    if not isinstance(schema, dict):
        return None
    forbidden: dict[str, bool] = {}
    for other in others:
        if not isinstance(other, dict):
            return None
        if disjoint(schema, other):
            continue
        needed = [*schema.get("required", []), *required]
        name = next((name for name in other.get("required", []) if name not in needed), None)
        if name is None or schema.get("type", "object") != "object" or "$ref" in schema:
            return None
        forbidden[name] = False
    if not forbidden:
        return schema
    return {**schema, "type": "object", "properties": {**schema.get("properties", {}), **forbidden}}


def disjoint(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether no value can fulfil both schemas, as far as their types and enumerated values show it."""
    if _apart(one, other):
        return True
    shared = [name for name in one.get("required", []) if name in other.get("required", [])]
    if one.get("type") != "object" and other.get("type") != "object":
        shared = []
    mine, theirs = one.get("properties", {}), other.get("properties", {})
    parts = [(mine.get(name), theirs.get(name)) for name in shared]
    return any(isinstance(a, dict) and isinstance(b, dict) and _apart(a, b) for a, b in parts)


def _apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two schemas have types or enumerate values, and have none in common."""
    if not _kinds(one) & _kinds(other):
        return True
    mine, theirs = _values(one), _values(other)
    return mine is not None and theirs is not None and not mine & theirs


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    kinds = schema.get("type", TYPES)
    return {"number" if kind == "integer" else kind for kind in ([kinds] if isinstance(kinds, str) else kinds)}


def _values(schema: Mapping[str, Any]) -> set[str] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return (
        {json.dumps(value, sort_keys=True).removesuffix(".0") for value in values} if isinstance(values, list) else None
    )


def _with(names: list[str], more: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*names, *more]))
