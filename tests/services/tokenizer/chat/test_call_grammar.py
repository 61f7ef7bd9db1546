"""A text that is of the requested form or calls a tool: its grammar accepts its tokens, and no others."""

import pytest

from pagewire.services.tokenizer.chat.call_grammar import call_rule
from pagewire.services.tokenizer.chat.reasoning_grammar import reasoning_grammar
from pagewire.services.tokenizer.chat.tool_use import Progress
from pagewire.services.tokenizer.validation.grammar_checker import grammar_of
from pagewire.shared.chat.formats import TOOL_TAGS
from pagewire.shared.grammar_compiler import GrammarCompiler
from tests.services.tokenizer.chat.test_reasoning_grammar import FORM, PLAIN, library

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


def accepts(calls: str, reasoning: str, progress: Progress, text: str, *, special: bool) -> bool:
    tags = dict.fromkeys([*TOOL_TAGS[calls], "<think>", "</think>"])
    words = library(*(tags if special else ()), special=True)
    ids = {token.content: i for i, token in words.get_added_tokens_decoder().items() if token.content in tags}
    prefix = reasoning_grammar(reasoning, progress, ids, call_rule(calls, ["look", "listen"], ids))
    matcher = GrammarCompiler(lambda: words, words.get_vocab_size(), {0}).compile(grammar_of(FORM, prefix=prefix))
    tokens = words.encode(text).ids
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("calls", CALLS)
def test_an_answer_is_of_the_form_or_a_call(calls: str, *, special: bool) -> None:
    assert accepts(calls, "", Progress.OVER, CALLS[calls], special=special)
    assert accepts(calls, "", Progress.OVER, PLAIN, special=special)
    assert not accepts(calls, "", Progress.OVER, "Well, ", special=special)
    if calls in {"hermes", "llama3_json", "pythonic"}:
        assert not accepts(calls, "", Progress.OVER, CALLS[calls].replace("look", "fly"), special=special)


@pytest.mark.parametrize("special", [False, True])
def test_reasoning_comes_before_either(*, special: bool) -> None:
    for text in (CALLS["hermes"], PLAIN):
        assert accepts("hermes", "think", Progress.AHEAD, f"<think>Hm.</think>\n{text}", special=special)
        assert accepts("hermes", "think", Progress.BEGUN, f"Hm.</think>\n{text}", special=special)


def test_a_model_that_may_not_call_has_no_rule() -> None:
    assert {call_rule(calls, ["look"], {}) for calls in ("", "named", "required")} == {""}
