from typing import Any

import jsonschema
import pytest

from pagewire.services.tokenizer.validation.json_schemas import MOST_ALTERNATIVES, closed, exclusive, stricter

NAMES = {"type": "string"}
SHAPES = {"oneOf": [{"required": ["side"]}, {"required": ["radius"]}, {"required": ["base", "height"]}]}
KINDS = [{"properties": {"kind": {"const": kind}}, "required": ["kind", kind]} for kind in ("a", "b")]
VALUES: list[Any] = [
    *(dict.fromkeys(names, 1) for names in ([], ["side"], ["radius"], ["side", "radius"], ["base", "height"])),
    *({"kind": kind, name: 1} for kind in "ab" for name in "ab"),
    *({"a": 1, "b": 1}, {"b": 1}, {"a": 1}, 1, 2, 3, "x", None, [], {"c": 1}),
]


@pytest.mark.parametrize(
    ("schema", "allowed"),
    [
        (SHAPES, 3),
        ({"oneOf": KINDS}, 2),
        ({"oneOf": [{"const": 1}, {"enum": [2, 3]}]}, 3),
        ({"oneOf": [{"required": ["a"]}, {"required": ["a", "b"]}]}, 1),
        ({"dependencies": {"a": ["b"]}}, 5),
        ({"dependencies": {"a": ["b"]}, "properties": {"a": {}, "c": {}}, "additionalProperties": False}, 5),
        ({"dependentSchemas": {"a": {"required": ["b"]}}}, 5),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 1, "type": "object"}, 2),
    ],
)
def test_a_value_of_the_stricter_schema_is_one_of_the_original(schema: Any, allowed: int) -> None:
    original, strict = jsonschema.Draft202012Validator(schema), jsonschema.Draft202012Validator(stricter(schema))
    valid = [value for value in VALUES if strict.is_valid(value)]
    assert all(original.is_valid(value) for value in valid)
    assert len(valid) >= allowed
    rest = stricter(schema).keys()
    assert not rest & {"oneOf", "dependencies", "dependentSchemas", "minProperties"}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": NAMES}},
        {"oneOf": [{"pattern": "^a"}, {"pattern": "^b"}]},
        {"properties": {"format": NAMES, "oneOf": NAMES, "dependencies": NAMES}, "enum": [{"format": "any"}]},
        {"type": "string", "format": "date"},
    ],
)
def test_other_schemas_stay_as_they_are(schema: Any) -> None:
    assert stricter(schema) == schema


def test_many_alternatives_are_compared_in_linear_time_or_not_at_all() -> None:
    """A schema of a megabyte has 50,000 alternatives, and two threads compile all grammars."""
    many = [{"const": 2**53 + number} for number in range(20 * MOST_ALTERNATIVES)]
    assert exclusive(many)
    assert not exclusive([*many, many[0]])
    objects = [{"type": "object", "required": [f"p{number}"]} for number in range(20 * MOST_ALTERNATIVES)]
    assert stricter({"oneOf": objects}) == {"oneOf": objects}


def test_closed_objects_have_no_other_properties() -> None:
    inner = {"properties": {"b": NAMES}, "additionalProperties": NAMES}
    schema = {"properties": {"a": {"items": {"properties": {"c": NAMES}}}, "properties": inner}}
    rewritten = closed(schema)
    assert rewritten["additionalProperties"] is False
    assert rewritten["properties"]["a"]["items"]["additionalProperties"] is False
    assert rewritten["properties"]["properties"] == inner
