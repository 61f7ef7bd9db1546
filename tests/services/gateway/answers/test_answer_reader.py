import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.gateway.answers.answer_reader import AnswerReader
from pagewire.shared.chat.parts import Kind, Part
from pagewire.shared.messages.client import ChatFormat, Choice, FinalChoice

THINKS_AND_CALLS = ChatFormat(tool_calls="hermes", reasoning="think")
TEXT = '<think>Hm.</think>I look.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def test_an_empty_text_without_a_format_is_no_part() -> None:
    reader = AnswerReader("r1", None)
    assert (reader.push(0, ""), reader.push(0, "Hi")) == ([], [Part(Kind.CONTENT, "Hi")])
    assert reader.end(FinalChoice(0, "stop")) == []


def test_an_empty_answer_is_one_block_of_content() -> None:
    (block,) = AnswerReader("r1", None).blocks(Choice(0, "", [], "stop"))
    assert (block.kind, block.text) == (Kind.CONTENT, "")


def test_the_blocks_of_an_answer_are_reasoning_content_and_calls() -> None:
    reader = AnswerReader("r1", THINKS_AND_CALLS)
    blocks = reader.blocks(Choice(0, TEXT, [1], "stop"))
    assert [(block.kind, block.name, block.text) for block in blocks] == [
        (Kind.REASONING, "", "Hm."),
        (Kind.CONTENT, "", "I look."),
        (Kind.NAME, "f", '{"a": 1}'),
    ]
    assert blocks[-1].call_id == reader.call_id(0, 0)


def test_hidden_reasoning_is_neither_a_part_nor_a_block() -> None:
    reader = AnswerReader("r1", THINKS_AND_CALLS, reasoning=False)
    assert Kind.REASONING not in {part.kind for part in reader.push(0, TEXT)}
    assert Kind.REASONING not in {block.kind for block in reader.blocks(Choice(0, TEXT, [1], "stop"))}


def test_the_blocks_of_an_answer_keep_their_order() -> None:
    text = 'Now. <tool_call>{"name": "f", "arguments": {}}</tool_call> Then.'
    blocks = AnswerReader("r1", THINKS_AND_CALLS).blocks(Choice(0, text, [1], "stop"))
    assert [(block.kind, block.text) for block in blocks] == [
        (Kind.CONTENT, "Now."),
        (Kind.NAME, "{}"),
        (Kind.CONTENT, "Then."),
    ]


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x', False),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>x</parameter><parameter=b>y", False),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>Done.', True),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{"na', True),
    ],
)
def test_a_stop_string_within_a_call_leaves_no_call_to_make(form: str, text: str, *, calls: bool) -> None:
    reader = AnswerReader("r1", ChatFormat(form))
    choice = Choice(0, text, [1], "stop", "STOP")
    reader.message(choice)
    assert reader.calls(choice) is calls
    reader = AnswerReader("r1", ChatFormat(form))
    end = FinalChoice(0, "stop", "STOP")
    reader.push(0, text)
    reader.end(end)
    assert reader.calls(end) is calls


@given(st.lists(st.integers(0, len(TEXT)), max_size=5))
def test_an_answer_ends_for_the_same_reason_whole_and_in_pieces(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(TEXT)]
    reader = AnswerReader("r1", THINKS_AND_CALLS)
    for begin, end in itertools.pairwise(bounds):
        reader.push(1, TEXT[begin:end])
    reader.end(FinalChoice(1, "stop"))
    assert reader.calls(FinalChoice(1, "stop"))
    assert not reader.calls(FinalChoice(1, "length")), "a cut answer does not end because of its calls"
    assert not reader.calls(FinalChoice(0, "stop")), "another choice has no call"
    whole = AnswerReader("r1", THINKS_AND_CALLS)
    choice = Choice(1, TEXT, [1], "stop")
    whole.message(choice)
    assert whole.calls(choice)
