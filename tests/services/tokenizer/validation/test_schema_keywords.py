import asyncio
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import assume, given
from hypothesis import strategies as st

from pagewire.services.tokenizer.chat.tool_grammar import tool_grammar
from pagewire.services.tokenizer.validation.schema_keywords import HOSTNAME, MOST_CHARACTERS, PATTERNS
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import StructuredOutputsParams
from tests.support.schemas import checker, draw, takes
from tools.experiments.correctness.inputs.random_values import Unfinished
from tools.experiments.correctness.schemas import validator

NUMBER = {"type": "number"}


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
        (
            {
                "type": "object",
                "propertyNames": {"$ref": "#/$defs/Color"},
                "additionalProperties": NUMBER,
                "$defs": {"Color": {"title": "Color", "type": "string", "enum": ["red"]}},
            },
            '{"red":1}',
            '{"blue":1}',
        ),
        ({"type": "array", "uniqueItems": True, "items": {"enum": ["a", 2]}, "minItems": 1}, '["a",2]', '["a","a"]'),
        ({"uniqueItems": True, "items": {"type": ["string", "null"], "enum": ["a", None]}}, '["a",null]', '["a","a"]'),
        (
            {"uniqueItems": True, "items": {"$ref": "#/$defs/C"}, "$defs": {"C": {"type": "string", "enum": ["a"]}}},
            '["a"]',
            '["a","a"]',
        ),
        ({"type": "string", "format": "binary", "maxLength": 1}, '"a"', '"ab"'),
        ({"type": "string", "format": "hostname", "pattern": HOSTNAME}, '"a.b-c.de"', '"-a.de"'),
        ({"type": "string", "pattern": list(PATTERNS)[1]}, '"👍🏽"', '"12"'),
        ({"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1}, "9007199254740991", "9007199254740992"),
        ({"properties": {"a": {"not": {}}}, "additionalProperties": False, "type": "object"}, "{}", '{"a":1}'),
        ({"type": "string", "format": "email", "pattern": list(PATTERNS)[2]}, '"a.b@c.de"', '"a..b@c.de"'),
        ({"type": "string", "format": "duration", "pattern": list(PATTERNS)[3]}, '"P1DT2H"', '"P"'),
        # pydantic's, Jackson's, Go's and .NET's
        ({"type": "array", "items": NUMBER, "uniqueItems": False}, "[1,1]", '["a"]'),
        ({"type": "array", "items": NUMBER, "uniqueItems": True, "maxItems": 1}, "[1]", "[1,1]"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "-9007199254740993", "9223372036854775808"),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, "0", "18446744073709551616"),
        ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, "10000000", '"a"'),
        ({"type": "number", "minimum": -3.4028235e38, "maximum": 3.4028235e38}, "1.5", '"a"'),
        ({"type": "number", "maximum": 1.7976931348623157e308}, "9" * 308, "9" * 310),
        ({"type": "object", "properties": {"a": NUMBER}, "required": None}, "{}", '{"a":"b"}'),
        # data is no schema
        ({"enum": [{"$ref": "#/x"}]}, '{"$ref":"#/x"}', "{}"),
        ({"const": {"uniqueItems": False, "required": None}}, '{"uniqueItems":false,"required":null}', "{}"),
    ],
)
def test_schemas_of_every_day_are_taken_as_they_mean(schema: Any, taken: str, refused: str) -> None:
    assert takes(schema, taken)
    assert not takes(schema, refused)


@pytest.mark.parametrize("pattern", PATTERNS)
@given(st.data())
def test_a_pattern_and_its_equivalent_take_the_same_texts(pattern: str, data: st.DataObject) -> None:
    letters, equal = "PTYMWDHS.@a-+'019,👍🇫⃣#", PATTERNS[pattern]
    texts = st.text(letters, max_size=12)
    if "p{" not in pattern:  # which `re` lacks
        texts |= st.from_regex(equal, alphabet=letters, fullmatch=True)
    text = data.draw(texts)
    assume(len(text) <= MOST_CHARACTERS)
    if "p{" in pattern:
        assert regex.search(pattern, text) or not regex.search(equal, text)
    else:
        assert bool(regex.search(pattern, text)) == bool(regex.search(equal, text))


GENERATED = Path(__file__).parents[3] / "data" / "generated_schemas.jsonl"
LINES = [json.loads(line) for line in GENERATED.read_text().splitlines()]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line["name"])
def test_values_of_a_generated_schemas_grammar_are_valid(line: dict[str, Any]) -> None:
    """`python -m tools.experiments schemas` draws many more."""
    params = StructuredOutputsParams(json=line["schema"])
    if line["refused"]:
        with pytest.raises(InvalidRequest, match=re.escape(line["refused"])):
            asyncio.run(checker().grammar(params))
        return
    grammar = asyncio.run(checker().grammar(params))
    for seed in range(3):
        with suppress(Unfinished):
            validator(line["schema"]).validate(draw(grammar, seed))


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
