import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.tokenizer.chat.tool_grammar import tool_grammar
from pagewire.services.tokenizer.validation.grammar_checker import grammar_of
from pagewire.services.tokenizer.validation.schema_keywords import EXACT, LARGEST, PATTERNS, simplified
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.grammar_compiler import GrammarCompiler
from pagewire.shared.messages.client import StructuredOutputsParams
from pagewire.shared.models.tokenizer_files import load_tokenizer

ROOT = Path(__file__).parents[4]
NUMBER = {"type": "number"}


@cache
def compiler() -> GrammarCompiler:
    backend = load_tokenizer(ROOT / "pagewire" / "bundled").backend
    return GrammarCompiler(lambda: backend, backend.get_vocab_size(), {0})


def takes(schema: Any, text: str) -> bool:
    """Returns whether the grammar of a schema takes a text."""
    matcher = compiler().compile(grammar_of(StructuredOutputsParams(json=schema)))
    ids = load_tokenizer(ROOT / "pagewire" / "bundled").backend.encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        # zod's z.record, z.int, z.never, z.email, z.duration
        (
            {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": NUMBER},
            '{"a":1}',
            '{"a":"b"}',
        ),
        ({"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": NUMBER}, '{"a":1}', '{"b":1}'),
        ({"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": NUMBER}, '{"ab":1}', '{"b":1}'),
        ({"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1}, "9007199254740991", "9007199254740992"),
        ({"properties": {"a": {"not": {}}}, "additionalProperties": False, "type": "object"}, "{}", '{"a":1}'),
        ({"type": "string", "format": "email", "pattern": next(iter(PATTERNS))}, '"a.b@c.de"', '"a..b@c.de"'),
        ({"type": "string", "format": "duration", "pattern": list(PATTERNS)[1]}, '"P1DT2H"', '"P"'),
        # pydantic's, Jackson's, Go's and .NET's
        ({"type": "array", "items": NUMBER, "uniqueItems": False}, "[1,1]", '["a"]'),
        ({"type": "array", "items": NUMBER, "uniqueItems": True, "maxItems": 1}, "[1]", "[1,1]"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "-9007199254740993", "9223372036854775808"),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, "0", "18446744073709551616"),
        ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, "1e9", '"a"'),
        ({"type": "number", "minimum": -3.4028235e38, "maximum": 3.4028235e38}, "1.5", '"a"'),
        ({"type": "object", "properties": {"a": NUMBER}, "required": None}, "{}", '{"a":"b"}'),
        # data is no schema
        ({"enum": [{"$ref": "#/x"}]}, '{"$ref":"#/x"}', "{}"),
        ({"const": {"uniqueItems": False, "required": None}}, '{"uniqueItems":false,"required":null}', "{}"),
    ],
)
def test_schemas_of_every_day_are_taken_as_they_mean(schema: Any, taken: str, refused: str) -> None:
    assert takes(schema, taken)
    assert not takes(schema, refused)


@pytest.mark.parametrize("keyword", ["const", "enum"])
@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: {"a": [value]}])
def test_an_integer_is_exact_or_refused(keyword: str, wrap: Any) -> None:
    for number in (EXACT, -EXACT, 1234567890123456789, 2**53 + 1, 2**63 - 1):
        schema = {keyword: [wrap(number)] if keyword == "enum" else wrap(number)}
        if abs(number) <= EXACT:
            assert takes(schema, json.dumps(wrap(number), separators=(",", ":")))
        else:
            with pytest.raises(InvalidRequest, match=str(number)):
                grammar_of(StructuredOutputsParams(json=schema))


@given(
    st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
    st.integers(-(2**64), 2**64) | st.integers(0, 99).map(lambda more: EXACT + more),
    st.integers(-3000, 3000),
)
def test_a_bound_never_lets_a_forbidden_number_through(keyword: str, bound: int, distance: int) -> None:
    schema = {"type": "integer", keyword: bound}
    try:
        rewritten = simplified(schema)
    except ValueError:
        return
    assert abs(rewritten[keyword]) <= LARGEST
    assert float(rewritten[keyword]) == rewritten[keyword], "llguidance computes with doubles"
    if jsonschema.Draft202012Validator(rewritten).is_valid(bound + distance):
        assert jsonschema.Draft202012Validator(schema).is_valid(bound + distance)


@pytest.mark.parametrize("pattern", PATTERNS)
@given(st.data())
def test_a_pattern_and_its_equivalent_take_the_same_texts(pattern: str, data: st.DataObject) -> None:
    equal = PATTERNS[pattern]
    text = data.draw(
        st.from_regex(equal, alphabet="PTYMWDHS.@a-+'019,", fullmatch=True)
        | st.text("PTYMWDHS.@a-+'019,", max_size=12)
        | st.from_regex(pattern, alphabet="PTYMWDHS.@a-+'019,", fullmatch=True)
    )
    assert bool(re.fullmatch(pattern, text)) == bool(re.fullmatch(equal, text))


def test_references_of_a_tool_stay_in_its_own_schema() -> None:
    parameters = [
        {"properties": {"a": {"$ref": "#/$defs/q"}}, "required": ["a"], "$defs": {"q": NUMBER}},
        {"$id": "http://x/y", "properties": {"a": {"$ref": "#q"}}, "$defs": {"q": {"$anchor": "q", **NUMBER}}},
        {"properties": {"a": {"enum": [{"$ref": "#/x"}]}}},
        {"properties": {"a": {"$ref": "#"}}},
    ]
    tools = [{"function": {"name": f"f{i}", "parameters": each}} for i, each in enumerate(parameters)]
    schema = tool_grammar(tools, None, single=False)
    for text, valid in (
        ('[{"name":"f0","parameters":{"a":1}}]', True),
        ('[{"name":"f0","parameters":{"a":"b"}}]', False),
        ('[{"name":"f1","parameters":{"a":1}},{"name":"f3","parameters":{"a":{"a":{}}}}]', True),
        ('[{"name":"f2","parameters":{"a":{"$ref":"#/x"}}}]', True),
        ('[{"name":"f2","parameters":{"a":{"$ref":"#/defs/2/x"}}}]', False),
    ):
        assert takes(schema, text) is valid
