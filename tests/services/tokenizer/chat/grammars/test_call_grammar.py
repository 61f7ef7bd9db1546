"""A text that is of the requested form or calls a tool: its grammar accepts its tokens, and no others."""

import re
from collections.abc import Mapping

import pytest

from pagewire.services.tokenizer.chat.grammars.call_grammar import HELD, any_arguments, call_rule, free_rule
from pagewire.services.tokenizer.chat.grammars.reasoning_grammar import reasoning_grammar
from pagewire.services.tokenizer.chat.grammars.typed_calls import arguments_of, arguments_rule
from pagewire.services.tokenizer.chat.tool_grammar import call_schema
from pagewire.services.tokenizer.chat.tool_use import Progress
from pagewire.services.tokenizer.validation.grammar_checker import grammar_of
from pagewire.shared.chat.formats import TOOL_TAGS, TYPED
from pagewire.shared.grammar_compiler import GrammarCompiler
from pagewire.shared.messages.client import StructuredOutputsParams
from tests.services.tokenizer.chat.grammars.test_reasoning_grammar import FORM, PLAIN, library

CALLS = {
    "hermes": '<tool_call>\n{"name":"look","arguments":{"at":"x"}}\n</tool_call>',
    "llama3_json": '{"name":"look","parameters":{"at":"x"}}',
    "pythonic": "[look(at='x')]",
    "mistral": '[TOOL_CALLS]look[ARGS]{"at": "x"}',
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=at>\nx\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
    "kimi_k2": '<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"at":"x"}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "harmony": '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":"x"}<|call|>',
}


SCHEMA = {
    "type": "object",
    "properties": {"at": {"type": "string"}},
    "required": ["at"],
    "additionalProperties": False,
}
ARGUMENTS = grammar_of(StructuredOutputsParams(json=SCHEMA))
BARE = grammar_of(
    StructuredOutputsParams(json=call_schema([{"name": "look", "parameters": SCHEMA}, {"name": "listen"}]))
)


def tools(calls: str, ids: Mapping[str, int]) -> dict[str, str]:
    """Lark of the arguments of two tools: those of the first follow the schema."""
    arguments = arguments_of({"name": "look", "parameters": SCHEMA}, ["at"])
    look = arguments_rule(calls, [(each, "") for each in arguments or ()], ids) if calls in TYPED else "@look"
    return {"look": look, "listen": any_arguments(calls)}


def accepts(calls: str, reasoning: str, progress: Progress, text: str, *, special: bool, free: bool = False) -> bool:
    tags = dict.fromkeys([*TOOL_TAGS[calls], "<think>", "</think>"])
    words = library(*(tags if special else ()), special=True)
    ids = {token.content: i for i, token in words.get_added_tokens_decoder().items() if token.content in tags}
    bare = "@bare" if calls == "llama3_json" and not free else ""
    rule, rest = call_rule(calls, tools(calls, ids), ids, bare), free_rule(calls, ids) if free else ""
    prefix = reasoning_grammar(reasoning, progress, ids, rule, rest)
    grammar = grammar_of(None if free else FORM, prefix=prefix, parts={"look": ARGUMENTS, "bare": BARE})
    matcher = GrammarCompiler(lambda: words, words.get_vocab_size(), {0}).compile(grammar)
    tokens = words.encode(text).ids
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("calls", CALLS)
def test_an_answer_is_of_the_form_or_a_call(calls: str, *, special: bool) -> None:
    assert accepts(calls, "", Progress.OVER, CALLS[calls], special=special)
    assert accepts(calls, "", Progress.OVER, PLAIN, special=special)
    assert not accepts(calls, "", Progress.OVER, "Well, ", special=special)
    assert not accepts(calls, "", Progress.OVER, CALLS[calls].replace("look", "fly"), special=special)


@pytest.mark.parametrize("special", [False, True])
def test_reasoning_comes_before_either(*, special: bool) -> None:
    for text in (CALLS["hermes"], PLAIN):
        assert accepts("hermes", "think", Progress.AHEAD, f"<think>Hm.</think>\n{text}", special=special)
        assert accepts("hermes", "think", Progress.BEGUN, f"Hm.</think>\n{text}", special=special)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("calls", sorted(HELD))
def test_the_arguments_of_a_call_follow_the_schema(calls: str, *, special: bool) -> None:
    for free in (False, True):
        reasoning, progress = ("harmony", Progress.AHEAD) if calls == "harmony" else ("", Progress.OVER)
        called = [CALLS[calls]]
        if free and calls not in {"harmony", "llama3_json"}:
            called += [f"Well.\n{CALLS[calls]}", CALLS[calls] * 2]
        for text in called:
            assert accepts(calls, reasoning, progress, text, special=special, free=free), text
            other = re.sub(r"\bat\b", "a", text)
            assert not accepts(calls, reasoning, progress, other, special=special, free=free), other
            other = other.replace("look", "listen")
            assert accepts(calls, reasoning, progress, other, special=special, free=free), other


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("calls", sorted(HELD - {"harmony"}))
def test_an_answer_without_a_call_is_free(calls: str, *, special: bool) -> None:
    for text in ("", "Well, 1 < 2 and [TOOL", '{"a": 1}', '[{"name": 1}]'):
        assert accepts(calls, "", Progress.OVER, text, special=special, free=True), text
        assert accepts(calls, "think", Progress.AHEAD, f"<think>Hm.</think>{text}", special=special, free=True), text


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("begin", ['{"type": "function", "name"', ' <|python_tag|> {"name"', '{"na\\u006de"'])
def test_a_call_without_a_tag_follows_the_schema_however_it_begins(begin: str, *, special: bool) -> None:
    text = begin + ': "look", "parameters": {"a": "x"}}'
    assert not accepts("llama3_json", "", Progress.OVER, text, special=special, free=True)


def test_arguments_with_a_malformed_schema_are_free() -> None:
    malformed: list[object] = [True, [{}], "at"]
    for required in malformed:
        assert arguments_of({"name": "f", "parameters": {"properties": {"at": {}}, "required": required}}, []) is None


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("calls", sorted(TYPED))
def test_arguments_between_tags_are_texts_choices_or_json(calls: str, *, special: bool) -> None:
    properties = {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "day": {"$ref": "#/$defs/day"},
    }
    parameters = {"properties": properties, "required": ["unit", "city"], "$defs": {"day": {"type": "integer"}}}
    arguments = arguments_of({"name": "look", "parameters": parameters}, ["city", "unit"])
    assert arguments is not None
    words = library(*(TOOL_TAGS[calls] if special else ()), special=True)
    ids = {
        token.content: i for i, token in words.get_added_tokens_decoder().items() if token.content in TOOL_TAGS[calls]
    }
    look = arguments_rule(calls, [(each, "" if each.is_text else "@day") for each in arguments], ids)
    day = grammar_of(StructuredOutputsParams(json=arguments[-1].schema))
    prefix = f"start: call\n{call_rule(calls, {'look': look}, ids)}"
    compiler = GrammarCompiler(lambda: words, words.get_vocab_size(), {0})
    matcher = compiler.compile(grammar_of(None, prefix=prefix, parts={"day": day}))

    def takes(*values: tuple[str, str]) -> bool:
        if calls == "glm45":
            body = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values)
            text = f"<tool_call>look\n{body}</tool_call>"
        else:
            body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values)
            text = f"<tool_call>\n<function=look>\n{body}</function>\n</tool_call>"
        tokens = words.encode(text).ids
        fresh = matcher.deep_copy()
        return bool(fresh.try_consume_tokens(tokens) == len(tokens) and fresh.is_accepting())

    assert takes(("city", "New\nYork <1>"), ("unit", "C"))
    assert takes(("city", ""), ("unit", "F"), ("day", "12"))
    for wrong in ([("city", "x")], [("city", "x"), ("unit", "K")], [("city", "x"), ("unit", "C"), ("day", "y")]):
        assert not takes(*wrong)


@pytest.mark.parametrize("parameters", [{"anyOf": [{}]}, {"properties": {"a b": {}}}, {"required": ["a"]}])
def test_arguments_that_cannot_be_written_one_by_one_are_not_listed(parameters: dict[str, object]) -> None:
    assert arguments_of({"name": "f", "parameters": parameters}, []) is None


def test_a_model_that_may_not_call_has_no_rule() -> None:
    assert {call_rule(calls, {}, {}) for calls in ("", "named", "required")} == {""}
