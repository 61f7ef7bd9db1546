"""Rewrites JSON schemas. Pure."""

from typing import Any

JsonSchema = dict[str, Any] | bool


def closed(schema: Any) -> Any:
    """Returns a schema in which objects have no properties beside those that it names, unless it says otherwise."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.keys() & {"additionalProperties", "patternProperties"}:
        inner["additionalProperties"] = False
    return inner
