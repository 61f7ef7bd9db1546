"""Answers of models in each format, whole and in pieces."""

import json
import time
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagewire.shared.chat.formats import HARMONY, REASONING, REASONING_PARSERS, TOOL_CALLS, TOOL_PARSERS
from pagewire.shared.chat.parser import Call, Message, MessageParser, read_message
from pagewire.shared.chat.parts import Kind
from pagewire.shared.messages.client import ChatFormat

WEATHER = '{"city": "Paris, {France}", "days": [1, 2], "note": "a \\"quoted\\" \\\\"}'
CALL = Call("get_weather", WEATHER)
TIME = Call("get_time", "{}")

MESSAGES: list[tuple[str, str, Message]] = [
    # Hermes 2 Pro and 3, Qwen 2.5 and 3
    (
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
        Message(None, None, [CALL]),
    ),
    (
        "hermes",
        f'I look it up.\n\n<tool_call>\n{{"arguments": {WEATHER}, "name": "get_weather"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        Message("I look it up.", None, [CALL, TIME]),
    ),
    ("hermes", '<tool_call>{"name": "get_time"}', Message(None, None, [TIME])),
    (
        "hermes",
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\nDone.',
        Message("Done.", None, [TIME]),
    ),
    # Llama 3.1 and 3.2
    ("llama3_json", f'{{"name": "get_weather", "parameters": {WEATHER}}}', Message(None, None, [CALL])),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {WEATHER}}}; {{"name": "get_time", "parameters": {{}}}}',
        Message(None, None, [CALL, TIME]),
    ),
    (
        "llama3_json",
        f'{{"type": "function", "name": "get_weather", "parameters": {WEATHER}}}',
        Message(None, None, [CALL]),
    ),
    # Mistral before and since tokenizer 11
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}, "id": "x1"}}, '
        '{"name": "get_time", "arguments": {}}]',
        Message(None, None, [CALL, TIME]),
    ),
    (
        "mistral",
        f"I look it up.[TOOL_CALLS]get_weather[ARGS]{WEATHER}[TOOL_CALLS]get_time{{}}",
        Message("I look it up.", None, [CALL, TIME]),
    ),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{WEATHER}", Message(None, None, [CALL])),
    # Llama 3.2 and 4
    (
        "pythonic",
        "[get_weather(city='Paris', days=[1, 2], exact=True, units=None), get_time()]",
        Message(
            None,
            None,
            [Call("get_weather", '{"city": "Paris", "days": [1, 2], "exact": true, "units": null}'), TIME],
        ),
    ),
    (
        "pythonic",
        '<|python_start|>[f(text="a, b) \\"c\\"", more={"x": (1, -2.5)}, ok=false)]<|python_end|>',
        Message(None, None, [Call("f", '{"text": "a, b) \\"c\\"", "more": {"x": [1, -2.5]}, "ok": false}')]),
    ),
    # Qwen 3 Coder and 3.5
    (
        "qwen3_coder",
        "I look it up.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n[1, 2]\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=note>\n42\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        Message(
            "I look it up.",
            None,
            [Call("get_weather", '{"city": "Paris", "days": [1, 2], "exact": true, "note": "42"}'), TIME],
        ),
    ),
    (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=note>\n\na < b\n\n</parameter></function>",
        Message(None, None, [Call("get_weather", '{"note": "\\na < b\\n"}')]),
    ),
    # GLM 4.5 and 4.6
    (
        "glm45",
        "I look it up.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>[1, 2]</arg_value>\n<arg_key>note</arg_key>\n<arg_value>42</arg_value>\n"
        "</tool_call>\n<tool_call>get_time</tool_call>",
        Message("I look it up.", None, [Call("get_weather", '{"city": "Paris", "days": [1, 2], "note": "42"}'), TIME]),
    ),
    # Kimi K2
    (
        "kimi_k2",
        f"I look it up.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{WEATHER}<|tool_call_end|><|tool_call_begin|>functions.get_time:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        Message("I look it up.", None, [CALL, TIME]),
    ),
    # gpt-oss
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
        f"<|message|>{WEATHER}<|call|>",
        Message("I look it up.", "Hm.", [CALL]),
    ),
    ("harmony", " to=functions.get_time<|channel|>commentary json<|message|>{}", Message(None, None, [TIME])),
    ("harmony", " to=functions.get_time<|channel|>commentary json<|message|><|call|>", Message(None, None, [TIME])),
    (
        "harmony",
        f" to=functions.get_weather<|channel|>commentary json<|message|>\n{WEATHER}",
        Message(None, None, [CALL]),
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        Message("Yes.<|return|>", "Hm."),
    ),
    # by a grammar
    (
        "required",
        f'[{{"name": "get_weather", "parameters": {WEATHER}}}, {{"name": "get_time", "parameters": {{}}}}]',
        Message(None, None, [CALL, TIME]),
    ),
    ("named", WEATHER, Message(None, None, [CALL])),
]
"""Format, text, and the message in it."""

NO_CALLS = [
    ("qwen3_coder", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
    ("qwen3_coder", "<tool_call>\n<function="),
    ("qwen3_coder", "<function=f></function>"),
    ("glm45", "<tool_call>"),
    ("glm45", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
    ("glm45", "<tool_call>get weather</tool_call>"),
    ("kimi_k2", "<|tool_calls_section_begin|>"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>[1]"),
    ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"),
    ("harmony", "The channel is final."),
    ("harmony", "<|channel|>final"),
    ("harmony", "<|channel|>" + "x" * 300 + "<|message|>y"),
    ("hermes", "<tool_call>\nget_weather(Paris)\n</tool_call>"),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "text"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": '),
    ("hermes", "<tool_cal"),
    ("hermes", '{"name": "f", "arguments": {}}'),
    ("hermes", '<tool_call>{"arguments": {"a": "' + "x" * 10_000 + '"}, "name": "f"}</tool_call>'),
    ("llama3_json", ' {"answer": 42}\n'),
    ("llama3_json", '{"name": "Bob", "age": 3'),
    ("llama3_json", '{"name": "Bob", "age": 3}'),
    ("llama3_json", '{"parameters": {"name": "x"}, "name": "get_time"}'),
    ("llama3_json", "The answer is {42}."),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] [1, 2]"),
    ("mistral", "[TOOL_CALLS]get weather{}"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=b)]"),
    ("pythonic", "[f(a=1e999)]"),
    ("pythonic", "[f(a='\\ud800')]"),
    ("pythonic", "[f(a='x"),
    ("pythonic", "[f(a=" + "(" * 500 + ")" * 500 + ")]"),
    ("required", "[]"),
]
"""Format, and a text that looks like a call and is content."""
CUT = [
    ("required", "["),
    ("required", '[{"name": "f"'),
    ("hermes", "<tool_cal"),
    ("hermes", '<tool_call>\n{"name": "get_w'),
    ("qwen3_coder", "<tool_call>\n<func"),
    ("glm45", "<tool_call>get_w"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>f"),
    ("harmony", "<|channel|>comm"),
    ("mistral", "[TOOL_CALLS]get_w"),
]
"""Format, and the beginning of a call."""
PIECES = [
    *["<function=f>", "<parameter=a>", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>"],
    *["</arg_value>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0"],
    *["<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>", "<|channel|>", "analysis"],
    *["<|message|>", "<|end|>", "<|start|>", "assistant", "final", " to=functions.f", "<|call|>"],
    *["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>"],
    *["\n", " ", "{", "}", "[", "]", "(", ")", ",", ";", ":", "=", '"', "\\", "'", "f", "1", "é", "-", "null"],
    *['"name": "f"', '"arguments": {}', '"parameters": {"a": [1]}', '{"name": "f", "arguments": {"b": 1}}', "f(a=1)"],
]
"""Pieces of random texts: tags, names and punctuation of all formats."""
forms = st.builds(
    ChatFormat,
    tool_calls=st.sampled_from(["", "named", *TOOL_CALLS]),
    reasoning=st.sampled_from(["", *REASONING]),
    opened=st.booleans(),
    single=st.booleans(),
    tool=st.just("f"),
)


def form_of(name: str, reasoning: str = "") -> ChatFormat:
    return ChatFormat(tool_calls=name, reasoning=reasoning, tool="get_weather", texts={"get_weather": ["note"]})


def in_pieces(text: str, form: ChatFormat, cuts: Sequence[int]) -> Message:
    """Returns the message of a text that arrives in pieces, which end at `cuts`."""
    parser, message, start = MessageParser(form), Message(), 0
    for end in [*sorted(min(cut, len(text)) for cut in cuts), len(text)]:
        for part in parser.push(text[start:end]):
            message.add(part)
        start = end
    for part in parser.end():
        message.add(part)
    return message


@pytest.mark.parametrize(("name", "text", "message"), MESSAGES)
def test_a_text_of_each_format_is_its_message(name: str, text: str, message: Message) -> None:
    assert read_message(text, form_of(name)) == message
    for call in message.calls:
        json.loads(call.arguments)
    assert in_pieces(text, form_of(name), range(len(text))) == message
    if name == HARMONY:
        return
    reasoned = read_message(f"<think>\nHm.\n</think>\n\n{text}", form_of(name, "think"))
    assert (reasoned.reasoning, reasoned.content, reasoned.calls) == ("Hm.", message.content, message.calls)


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_a_text_that_is_no_call_is_content_to_the_letter(name: str, text: str) -> None:
    assert read_message(text, form_of(name)) == Message(text)
    assert in_pieces(text, form_of(name), range(0, len(text), 3)) == Message(text)


@given(
    form=forms,
    text=st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=16).map("".join)
    | st.sampled_from([text for _, text, _ in MESSAGES] + [text[:300] for _, text in NO_CALLS]),
    cuts=st.lists(st.integers(0, 300), max_size=12),
)
@example(ChatFormat("hermes", "think"), "<think>a</think>b<tool_call>{", [1, 9, 10, 17, 18])
@example(ChatFormat("", "think"), "<think>", [])
@example(ChatFormat("", "think"), "<think></think>a", [])
@settings(max_examples=400, deadline=None)
def test_any_split_gives_the_same_message(form: ChatFormat, text: str, cuts: list[int]) -> None:
    whole = read_message(text, form)
    assert in_pieces(text, form, cuts) == whole
    if not form.tool_calls and not form.reasoning:
        assert whole == Message(text or None)
    marked_up = form.opened or HARMONY in (form.tool_calls, form.reasoning)
    reasons = form.reasoning in REASONING and text.lstrip().startswith(REASONING[form.reasoning][0])
    if not form.single and not whole.calls and not reasons and not marked_up:
        assert (whole.content or "") == text
    if form.single:
        assert len(whole.calls) <= 1


def test_arguments_of_a_call_are_passed_on_as_they_come() -> None:
    parser = MessageParser(form_of("hermes"))
    assert parser.push("Well. <tool") == [(Kind.CONTENT, "Well.", -1)]
    assert parser.push('_call>\n{"name": "f", "argum') == []
    assert parser.push('ents": {"a') == [(Kind.NAME, "f", 0), (Kind.ARGUMENTS, '{"a', 0)]
    assert parser.push('": "}') == [(Kind.ARGUMENTS, '": "}', 0)]
    assert parser.push('"}}</tool_call><') == [(Kind.ARGUMENTS, '"}', 0)]
    assert parser.end() == [(Kind.CONTENT, "<", -1)]


def test_only_the_first_call_counts_without_parallel_calls() -> None:
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>'
    assert read_message(text, ChatFormat("hermes", single=True)) == Message(None, None, [Call("f", "{}")])


@pytest.mark.parametrize(
    ("text", "opened", "message"),
    [
        ("<think>\nHm.\n\n</think>\n\nYes.\n", False, Message("Yes.\n", "Hm.")),
        ("Hm.</think>Yes.", True, Message("Yes.", "Hm.")),
        ("<think>Hm.</think>Yes.", True, Message("Yes.", "Hm.")),
        ("Hm. Well", True, Message(None, "Hm. Well")),
        ("Hm.</think>Yes.", False, Message("Hm.</think>Yes.")),
        ("  Yes. <think>x</think>", False, Message("  Yes. <think>x</think>")),
        ("<think>\n\n</think>\n\nYes.", False, Message("Yes.")),
        ("<think>a</thin", False, Message(None, "a</thin")),
    ],
)
def test_only_the_beginning_of_a_message_is_reasoning(text: str, opened: bool, message: Message) -> None:
    form = ChatFormat(reasoning="think", opened=opened)
    assert read_message(text, form) == message
    assert in_pieces(text, form, range(len(text))) == message


@pytest.mark.parametrize(
    ("name", "beginning"),
    [("hermes", '<tool_call>{"arguments": {'), ("hermes", '<tool_call>{"a": "'), ("mistral", '[TOOL_CALLS][{"a": [[')],
)
def test_a_long_text_of_beginnings_is_not_read_again_and_again(name: str, beginning: str) -> None:
    text = beginning * 4_000
    started = time.process_time()
    assert read_message(text, form_of(name)) == Message(text)
    assert time.process_time() - started < 2


def test_forced_calls_are_the_final_message_of_harmony() -> None:
    header = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
    named, required = (ChatFormat(name, HARMONY, tool="get_weather") for name in ("named", "required"))
    assert read_message(header + WEATHER, named) == Message(None, "Hm.", [CALL])
    text = f'{header}[{{"name": "get_weather", "parameters": {WEATHER}}}]'
    assert read_message(text, required) == Message(None, "Hm.", [CALL])
    assert in_pieces(text, required, range(len(text))) == Message(None, "Hm.", [CALL])
    assert read_message(WEATHER, named) == Message(None, None, [CALL])


@pytest.mark.parametrize("cut", [False, True])
def test_a_text_that_ends_before_its_forced_call_has_none(*, cut: bool) -> None:
    form = ChatFormat("named", "think", tool="get_weather")
    assert read_message("<think>Hm.", form, cut=cut) == Message(None, "Hm.")
    assert read_message("<think>Hm.</think>\n", form, cut=cut) == Message(None, "Hm.")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Pa'),
        ("qwen3_coder", "<tool_call><function=get_weather><parameter=city>Paris</parameter><parameter=note>a "),
        ("qwen3_coder", "<tool_call><function=get_weather><parameter=note>a "),
        ("glm45", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>note</arg_key>"),
        ("harmony", " to=functions.get_weather<|channel|>commentary json<|message|>"),
    ],
)
def test_the_arguments_of_a_call_that_was_cut_do_not_look_whole(name: str, text: str) -> None:
    (call,) = read_message(text, form_of(name), cut=True).calls
    with pytest.raises(ValueError):  # any text that is no JSON
        json.loads(call.arguments)


def test_a_text_without_a_format_is_content() -> None:
    assert read_message("<think>a</think>b", None) == Message("<think>a</think>b")


def test_every_parser_of_a_setting_has_a_format() -> None:
    assert set(TOOL_PARSERS.values()) <= set(TOOL_CALLS)
    assert set(REASONING_PARSERS.values()) <= set(REASONING)


@pytest.mark.parametrize(("form", "text"), CUT)
def test_the_beginning_of_a_call_that_was_cut_is_no_content(form: str, text: str) -> None:
    assert read_message(text, ChatFormat(form), cut=True).content is None
    before = "" if form in {"required", "harmony"} else "Let me see."
    assert read_message(before + text, ChatFormat(form), cut=True).content == (before or None)


def test_the_beginning_of_a_bare_call_may_be_an_answer() -> None:
    assert read_message('{"answer": 4', ChatFormat("llama3_json"), cut=True).content == '{"answer": 4'
    assert read_message("a <", ChatFormat("hermes"), cut=True).content == "a <"
