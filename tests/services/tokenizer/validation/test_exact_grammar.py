import asyncio
import json
from contextlib import suppress
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.tokenizer.validation.grammar_checker import grammar_of
from pagewire.services.tokenizer.validation.large_integers import EXACT, clamped, is_large
from pagewire.services.tokenizer.validation.schema_references import leading
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.grammar_compiler import GrammarError
from pagewire.shared.messages.client import StructuredOutputsParams
from tests.support.schemas import checker, draw, takes

ID = 1234567890123456789
LARGEST = 2**64 - 1
INTEGERS = st.integers(-(2**63), LARGEST) | st.integers(-9, 9).flatmap(
    lambda more: st.sampled_from([2**n + more for n in (53, 60, 63)] + [more - 2**n for n in (53, 60)])
)


NULL = {"type": "null"}
KEYWORDS = {
    *("$id", "$ref", "additionalProperties", "anyOf", "const", "enum", "items", "maxItems", "maximum", "minItems"),
    *("minimum", "multipleOf", "oneOf", "prefixItems", "properties", "required", "type", "a"),
}


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


@pytest.mark.parametrize("keyword", ["const", "enum"])
@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: {"a": [value, 1, {}]}])
@settings(max_examples=30)
@given(number=INTEGERS, distance=st.integers(-300, 300))
def test_an_integer_of_64_bits_is_exact(keyword: str, wrap: Any, number: int, distance: int) -> None:
    schema = {keyword: ["b", 7, wrap(number)] if keyword == "enum" else wrap(number)}
    assert takes(schema, json.dumps(wrap(number)))
    assert not takes(schema, json.dumps(wrap(number + distance))) or distance == 0 or number + distance == 7


@settings(max_examples=100)
@given(
    st.sampled_from(["integer", "number"]),
    st.sampled_from(["minimum", "exclusiveMinimum"]),
    st.sampled_from(["maximum", "exclusiveMaximum"]),
    INTEGERS,
    INTEGERS,
    st.integers(-3, 3),
)
def test_bounds_of_64_bits_are_exact(kind: str, lower: str, upper: str, one: int, other: int, distance: int) -> None:
    schema: dict[str, Any] = {"type": kind, lower: min(one, other), upper: max(one, other)}
    if one == other:
        return
    validator = jsonschema.Draft202012Validator(schema)
    for number in (schema[lower] + distance, schema[upper] + distance, (one + other) // 2):
        assert takes(schema, str(number)) == validator.is_valid(number)


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["-9223372036854775808", "0"], [str(2**63)]),
        ({"type": "integer", "minimum": 0, "maximum": LARGEST}, [str(LARGEST)], [str(LARGEST + 1), "-1"]),
        ({"type": ["integer", "null"], "maximum": LARGEST}, [str(LARGEST), "null"], [str(LARGEST + 1), "true"]),
        ({"minimum": 2**60}, ['"a"', str(2**60), "{}"], [str(2**60 - 1), "1.5"]),
        ({"type": "number", "maximum": 2**60 + 1}, ["1.5", "-0.5", str(2**60 + 1)], [str(2**60 + 2)]),
        ({"type": "integer", "enum": [ID, ID + 1, "a"], "maximum": ID}, [str(ID)], [str(ID + 1), '"a"']),
        (
            {"type": ["object", "null"], "properties": {"a": {"const": ID}, "b": {"type": "string"}}},
            ["null", "{}", f'{{"a":{ID}}}', f'{{ "a" : {ID} , "b" : "x" , "c" : [ 1 ] }}', '{"b":"x"}'],
            ['{"a":1}', '{"b":1}', '{"b":"x","a":1}', '{"\\u0061":1}', "{,}"],
        ),
        (
            {"type": "object", "additionalProperties": {"type": "integer", "maximum": LARGEST}},
            ["{}", f'{{"x": {LARGEST}, "y": 3}}'],
            [f'{{"x": {LARGEST + 1}}}'],
        ),
        (
            {"type": "array", "items": {"const": ID}, "minItems": 1, "maxItems": 2},
            [f"[{ID}]", f"[ {ID} , {ID} ]"],
            ["[]", f"[{ID},{ID},{ID}]", "[1]"],
        ),
        (
            {"type": "array", "prefixItems": [{"type": "null"}], "items": {"const": ID}, "minItems": 2},
            [f"[null, {ID}]", f"[null,{ID},{ID}]"],
            ["[null]", f"[{ID}]", "[null,1]"],
        ),
        (
            {"type": "array", "prefixItems": [{"const": ID}, {"type": "null"}], "items": False},
            ["[]", f"[{ID}]", f"[{ID},null]"],
            [f"[{ID},null,1]", "[null]"],
        ),
        (
            {
                "type": ["object", "null"],
                "properties": {"a": {"const": ID}, "b": {"$ref": "#/properties/c"}, "c": record(d=NULL)},
                "$defs": {"unused": {"$ref": "#/properties/b"}},
            },
            ["null", f'{{"a":{ID},"b":{{"d":null}},"c":{{"d":null}}}}'],
            [f'{{"a":{ID},"b":null}}', '{"a":1}'],
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "type": "array",
                "items": [{"const": ID}, NULL],
                "additionalItems": False,
            },
            ["[]", f"[{ID}]", f"[{ID},null]"],
            [f"[{ID},null,1]", "[null]"],
        ),
        (
            {"anyOf": [record(a={"type": "boolean"}), record(a={"const": ID}), {"type": "array", "maxItems": 1}]},
            ['{ "a" : true }', f'{{\n"a" :{ID}}}', "[ 1 ]"],
            ['{"a":1}', "[1,2]"],
        ),
        (
            {
                "$ref": "#/$defs/node",
                "$defs": {
                    "node": record(id={"const": ID}, next={"anyOf": [{"$ref": "#/$defs/node"}, {"$ref": "#/$defs/e"}]}),
                    "e": {"type": "null"},
                },
            },
            [f'{{"id":{ID},"next":{{"id":{ID},"next":null}}}}'],
            [f'{{"id":{ID},"next":{{"id":1,"next":null}}}}', f'{{"id":{ID},"next":1}}'],
        ),
    ],
)
def test_large_integers_are_exact_wherever_they_stand(schema: Any, taken: list[str], refused: list[str]) -> None:
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    for text in taken:
        assert takes(schema, text)
        assert validator.is_valid(json.loads(text))
    for text in refused:
        assert not takes(schema, text)


def test_a_schema_of_thousands_of_references_is_written_at_once() -> None:
    names = [f"n{index}" for index in range(3000)]
    definitions = {name: {"anyOf": [{"$ref": f"#/$defs/{other}"}, NULL]} for name, other in pairwise(names)}
    schema = {"$ref": "#/$defs/n0", "$defs": {**definitions, names[-1]: {"const": ID}}}
    assert len(leading(schema, is_large)) > 2 * len(definitions)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.just(ID)
    | st.sampled_from(["a", "object", "#", "#/properties/a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(KEYWORDS)), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from(sorted(KEYWORDS)), JSON, min_size=1, max_size=5))
def test_any_value_is_compiled_or_refused(schema: Any) -> None:
    with suppress(InvalidRequest, GrammarError):
        grammar_of(StructuredOutputsParams(json={**schema, "allOf": [{"const": ID}]}))
    with suppress(InvalidRequest, GrammarError):
        grammar_of(StructuredOutputsParams(json={"properties": {"a": schema, "b": {"const": ID}}}))


def test_white_space_can_be_forbidden_beside_large_integers() -> None:
    assert takes({"const": [ID, 1]}, f"[{ID},1]", disable_any_whitespace=True)
    assert not takes({"const": [ID, 1]}, f"[{ID}, 1]", disable_any_whitespace=True)


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("patternProperties", {"type": "object", "patternProperties": {"a": {"const": ID}}}),
        ("allOf", {"allOf": [{"const": ID}, {"type": "integer"}]}),
        ("multipleOf", {"type": "integer", "minimum": 2**60, "multipleOf": 3}),
        ("#anchor", {"anyOf": [{"$ref": "#anchor"}, {"const": ID}], "$defs": {"a": {"$anchor": "anchor"}}}),
    ],
)
def test_a_keyword_that_is_not_supported_beside_large_integers_is_named(keyword: str, schema: Any) -> None:
    with pytest.raises(GrammarError, match=keyword):
        grammar_of(StructuredOutputsParams(json=schema))
    with pytest.raises(InvalidRequest, match=keyword):
        asyncio.run(checker().grammar(StructuredOutputsParams(json=schema)))


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from(["minimum", "exclusiveMinimum"]), st.integers(-(2**63), -(2**53)))
def test_large_bounds_beside_such_a_keyword_demand_more(seed: int, keyword: str, bound: int) -> None:
    schema = {"type": "integer", keyword: bound, "maximum": LARGEST, "multipleOf": 5}
    grammar = asyncio.run(checker().grammar(StructuredOutputsParams(json=schema)))
    value = draw(grammar, seed)
    assert abs(value) <= EXACT
    assert jsonschema.Draft202012Validator(schema).is_valid(value)
    assert clamped({"maximum": 100}) == {"maximum": 100}


@pytest.mark.parametrize(
    "schema",
    [
        {"maximum": float("inf"), "minimum": ID},
        {"enum": [ID], "type": [{}]},
    ],
)
def test_a_malformed_schema_is_the_clients_fault(schema: dict[str, Any]) -> None:
    from pagewire.services.tokenizer.validation.json_schemas import stricter

    with pytest.raises((InvalidRequest, GrammarError)):
        grammar_of(StructuredOutputsParams(json=schema), rewrite=stricter)
