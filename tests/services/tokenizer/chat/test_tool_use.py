from typing import Any

import msgspec
import pytest

from pagewire.services.tokenizer.chat.format_recognition import Formats
from pagewire.services.tokenizer.chat.tool_grammar import tool_grammar
from pagewire.services.tokenizer.chat.tool_use import chat_format, check_tools, progress_of
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import ChatFormat, FunctionName, GenerateRequest, ToolChoice
from tests.services.tokenizer.chat.conversations import QUESTION, WEATHER, said

QWEN = Formats("hermes", "think", takes_tools=True)
TIME = {"type": "function", "function": {"name": "get_time"}}
NAMED = {"type": "function", "function": {"name": "get_time"}}


def request(**fields: Any) -> GenerateRequest:
    return msgspec.convert({"messages": [QUESTION], **fields}, GenerateRequest)


def form(formats: Formats = QWEN, prompt: str = "x", **fields: Any) -> ChatFormat | None:
    generate = request(**fields)
    check_tools(generate, formats)
    return chat_format(generate, formats, progress_of(generate, formats, prompt))


@pytest.mark.parametrize(
    ("fields", "formats", "reason"),
    [
        ({"tool_choice": "required"}, QWEN, "tool_choice needs tools"),
        ({"tool_choice": NAMED}, QWEN, "tool_choice needs tools"),
        ({"messages": None, "prompt": "x", "tools": [TIME]}, QWEN, "tools need messages"),
        ({"tools": [TIME] * 129}, QWEN, "at most 128"),
        ({"tools": [{}]}, QWEN, "tools must be functions"),
        ({"tools": [{"type": "retrieval"}]}, QWEN, "tools must be functions"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, QWEN, "tools must have names"),
        ({"tools": [{"function": {"name": "f", "parameters": "x"}}]}, QWEN, "the parameters of f"),
        ({"tools": [{"function": {"name": "f", "parameters": {"a": [[]] * 100_000}}}]}, QWEN, "tools has more than"),
        ({"tools": [TIME]}, Formats(), "chat template does not show them"),
        ({"tools": [WEATHER], "tool_choice": NAMED}, QWEN, "names get_time, but tools has only get_weather"),
        ({"tools": [TIME]}, Formats(takes_tools=True), "--tool-call-parser"),
        ({"tools": [TIME]}, Formats("hermes", takes_tools=True, auto=False), "auto is switched off"),
    ],
)
def test_tools_that_cannot_be_used_are_refused_with_a_reason(
    fields: dict[str, Any], formats: Formats, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        check_tools(request(**fields), formats)


def test_a_plain_chat_has_no_format() -> None:
    assert form(Formats("hermes", takes_tools=True)) is None
    assert form(Formats(takes_tools=True), tools=[TIME], tool_choice="none") is None
    assert form(Formats(), tools=[TIME], tool_choice="none") is None
    assert form(tools=[], tool_choice="auto") == ChatFormat(reasoning="think")


def test_the_format_follows_the_choice() -> None:
    assert form(tools=[TIME]) == ChatFormat("hermes", "think")
    assert form(tools=[TIME], tool_choice="auto", parallel_tool_calls=False) == ChatFormat(
        "hermes", "think", single=True
    )
    assert form(tools=[TIME], tool_choice="none") == ChatFormat(reasoning="think")


def test_a_prompt_may_have_begun_the_reasoning() -> None:
    def opened(prompt: str, **fields: Any) -> bool:
        chat_form = form(prompt=prompt, **fields)
        assert chat_form is not None
        return chat_form.opened

    assert opened("<|im_start|>assistant\n<think>\n")
    assert not opened("What is <think>?<|im_start|>assistant\n")
    assert not opened("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    for content, begun in {"<think>Hm": True, "<think>Hm.</think>Well": False, "Well": False}.items():
        messages = [said("user", "<think>"), said("assistant", content)]
        assert opened(content, messages=messages, continue_final_message=True) is begun


def test_arguments_that_are_texts_are_named_for_formats_that_do_not_show_it() -> None:
    properties = {
        "a": {"type": "string"},
        "b": {"type": "integer"},
        "c": {"enum": ["x", "y"]},
        "d": {"type": ["string", "null"]},
        "e": {"enum": [1, "x"]},
        "f": {},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}, TIME]
    chat_form = form(Formats("qwen3_coder", takes_tools=True), tools=tools)
    assert chat_form == ChatFormat("qwen3_coder", texts={"f": ["a", "c", "d"]})
    assert form(Formats("hermes", takes_tools=True), tools=tools) == ChatFormat("hermes")


def test_the_grammar_of_a_named_tool_is_that_of_its_arguments() -> None:
    choice = ToolChoice(FunctionName("get_weather"))
    assert tool_grammar([TIME, WEATHER], choice, single=False) == WEATHER["function"]["parameters"]  # type: ignore[index]
    assert tool_grammar([TIME], ToolChoice(FunctionName("get_time")), single=True) == {"type": "object"}


def test_the_grammar_of_required_calls_has_every_tool_and_its_references() -> None:
    parameters = {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"anyOf": [{"$ref": "#"}, {"const": 1}]}}}
    tree = {"type": "function", "function": {"name": "tree", "parameters": parameters}}
    schema = tool_grammar([TIME, tree], None, single=True)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert [call["properties"]["name"] for call in schema["items"]["anyOf"]] == [
        {"const": "get_time"},
        {"const": "tree"},
    ]
    assert schema["items"]["anyOf"][1]["properties"]["parameters"] == {"$ref": "#/$defs/1"}
    assert schema["$defs"] == {
        "0": {"$id": "tool:0", "type": "object"},
        "1": {"$id": "tool:1", "type": "object", **parameters},
    }
    assert "maxItems" not in tool_grammar([TIME, tree], None, single=False)
