"""The arguments of calls that the model chooses to make, held by the schemas of the tools."""

import asyncio
from typing import Any

import msgspec
import pytest

from pagewire.services.tokenizer.answer_grammar import answer_grammar
from pagewire.services.tokenizer.chat.format_recognition import Formats
from pagewire.services.tokenizer.chat.tool_use import Progress, chat_format
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import GenerateRequest
from tests.services.tokenizer.chat.conversations import QUESTION
from tests.support.schemas import checker, compiler, tokenizer

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
SETS = {"type": "object", "properties": {"cities": {"type": "array", "uniqueItems": True}}}
HERMES = Formats("hermes", takes_tools=True)
AS_TEXT = Formats("hermes", takes_tools=True, tools_as_text=True)
FORM = {"structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}
RIGHT, WRONG, OTHER = (
    f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
    for name, city in (("look", "Paris"), ("look", "Rome"), ("listen", "Rome"))
)


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def grammar(formats: Formats, tools: list[dict[str, Any]], **fields: Any) -> str:
    request = msgspec.convert({"messages": [QUESTION], "tools": tools, **fields}, GenerateRequest)
    form = chat_format(request, formats, Progress.OVER)
    return asyncio.run(answer_grammar(checker(), formats, request, form, Progress.OVER))


def taken(text: str) -> list[str]:
    """Returns the texts `RIGHT`, `WRONG` and `OTHER` that a grammar takes."""
    texts = {"right": RIGHT, "wrong": WRONG, "other": OTHER}
    ids = {name: tokenizer().encode(each, add_special_tokens=False).ids for name, each in texts.items()}
    return [name for name in texts if compiler().compile(text).try_consume_tokens(ids[name]) == len(ids[name])]


def test_a_strict_tool_binds_its_own_arguments_alone() -> None:
    tools = [tool("look", parameters=CITY, strict=True), tool("listen", parameters=CITY)]
    assert taken(grammar(HERMES, tools)) == ["right", "other"]
    assert taken(grammar(AS_TEXT, tools)) == ["right"]
    assert taken(grammar(HERMES, tools, sampling=FORM)) == ["right"]


def test_a_tool_that_is_not_strict_costs_no_grammar() -> None:
    assert grammar(HERMES, [tool("look", parameters=CITY)]) == ""
    assert grammar(HERMES, [tool("look", parameters=CITY, strict=True)], tool_choice="none") == ""
    assert grammar(Formats("pythonic", takes_tools=True), [tool("look", parameters=CITY, strict=True)]) == ""


@pytest.mark.parametrize("sampling", [{"beam_width": 2}, {"bad_words": ["x"]}, {"allowed_token_ids": [1]}])
def test_strict_gives_way_to_sampling_that_excludes_grammars(sampling: dict[str, Any]) -> None:
    assert grammar(HERMES, [tool("look", parameters=CITY, strict=True)], sampling=sampling) == ""


@pytest.mark.parametrize("calls", ["glm45", "qwen3_coder"])
def test_strict_holds_arguments_between_tags(calls: str) -> None:
    formats, parameters = Formats(calls, takes_tools=True), {"properties": {"day": {"type": "integer"}}}
    assert "arguments0_0" in grammar(formats, [tool("look", parameters=parameters, strict=True)])
    with pytest.raises(InvalidRequest, match=r"look .*one by one"):
        grammar(formats, [tool("look", parameters={"anyOf": [parameters]}, strict=True)])


def test_a_schema_that_cannot_be_compiled_is_refused_only_where_it_is_strict() -> None:
    tools = [tool("look", parameters=CITY), tool("listen", parameters=SETS)]
    assert taken(grammar(AS_TEXT, tools)) == ["right", "other"]
    assert taken(grammar(HERMES, tools, sampling=FORM)) == ["right", "other"]
    with pytest.raises(InvalidRequest, match=r"tools: the parameters of listen .*uniqueItems"):
        grammar(HERMES, [tool("listen", parameters=SETS, strict=True)])


def test_tools_that_are_too_long_together_are_free_where_nothing_demands_more() -> None:
    long = {"type": "object", "properties": {"x" * 100_000: {}}}
    tools = [tool("look", parameters=long), tool("listen", parameters=long)]
    assert grammar(AS_TEXT, tools) == ""
    assert taken(grammar(HERMES, tools, sampling=FORM)) == ["right", "wrong", "other"]
