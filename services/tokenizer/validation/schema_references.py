"""References in JSON schemas: where they lead, and which parts of a schema lead to others. Pure."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from pagewire.services.tokenizer.validation.json_schemas import DATA, MAPS

Schema = Mapping[str, Any]
DEFINITIONS = ("$defs", "definitions")
"""Keywords whose schemas matter only where a reference leads to them."""


def pointed(reference: str, resource: Schema) -> tuple[Any, Schema]:
    """Returns the schema that a reference leads to, and the schema that the references in it are relative to.

    >>> pointed("#/$defs/a", {"$defs": {"a": {"type": "null"}}})[0]
    {'type': 'null'}

    Args:
        reference: `#`, or a pointer behind it.
        resource: the schema that the reference is relative to.

    Raises:
        LookupError: it leads nowhere, or is no pointer.
    """
    if reference != "#" and not reference.startswith("#/"):
        raise LookupError(reference)
    schema: Any = resource
    for step in _steps(reference):
        try:
            schema = schema[int(step)] if isinstance(schema, list) else schema[step]
        except (LookupError, TypeError, ValueError) as error:
            raise LookupError(reference) from error
        resource = resource_of(schema, resource)
    return schema, resource


def resource_of(schema: object, outer: Schema) -> Schema:
    """Returns the schema that the references in `schema` are relative to: itself, if it has an id."""
    return schema if isinstance(schema, dict) and "$id" in schema else outer


def parts_of(schema: Schema) -> Iterator[tuple[str, Any]]:
    """Yields the schemas right in a schema, with their keywords."""
    for name, value in schema.items():
        parts = value.values() if name in MAPS and isinstance(value, dict) else () if name in DATA else (value,)
        for part in parts:
            yield from ((name, each) for each in (part if isinstance(part, list) else [part]))


def leading(schema: Schema, is_end: Callable[[Schema], bool]) -> set[int]:
    """Returns the identities of the schemas that lead to one for which `is_end` holds, over parts and references.

    Raises:
        LookupError: a reference leads nowhere, or is no pointer.
    """
    sources: defaultdict[int, list[int]] = defaultdict(list)
    ends: list[int] = []
    ahead: list[tuple[Any, Schema]] = [(schema, schema)]
    seen: set[int] = set()
    while ahead:
        part, resource = ahead.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        if is_end(part):
            ends.append(id(part))
        inner = [(name, each, resource_of(each, resource)) for name, each in parts_of(part)]
        if isinstance(reference := part.get("$ref"), str):
            inner.append(("$ref", *pointed(reference, resource)))
        for name, each, its_resource in inner:
            ahead.append((each, its_resource))
            if name not in DEFINITIONS:
                sources[id(each)].append(id(part))
    reached: set[int] = set()
    while ends:
        if (end := ends.pop()) not in reached:
            reached.add(end)
            ends += sources[end]
    return reached


def definitions_of(part: Any, resource: Schema) -> dict[str, dict[str, Any]]:
    """Returns the definitions of `resource` that a part refers to, by their keyword and their name.

    Raises:
        LookupError: the part refers to something else.
    """
    definitions: dict[str, dict[str, Any]] = {}
    ahead = [part]
    while ahead:
        schema = ahead.pop()
        if isinstance(schema, dict) and "$id" not in schema:
            ahead += [each for _, each in parts_of(schema)]
            if isinstance(reference := schema.get("$ref"), str):
                keyword, name, *_ = [*_steps(reference), "", ""]
                if keyword not in DEFINITIONS:
                    raise LookupError(reference)
                if name not in definitions.setdefault(keyword, {}):
                    definitions[keyword][name] = resource[keyword][name]
                    ahead.append(resource[keyword][name])
    return definitions


def _steps(reference: str) -> list[str]:
    return [unquote(step).replace("~1", "/").replace("~0", "~") for step in reference.split("/")[1:]]
