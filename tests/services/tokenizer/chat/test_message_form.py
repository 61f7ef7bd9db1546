from typing import Any

import pytest

from pagewire.services.tokenizer.chat.message_form import formed
from pagewire.services.tokenizer.chat.template_probe import Message, MessageRules
from tests.services.tokenizer.chat.conversations import parts, said

USER, HI, MORE = said("user", "Hello!"), said("assistant", "Hi."), said("user", "Again!")
BRIEF, KIND = said("system", "Be brief."), said("system", "Be kind.")
LONG = "call_0123456789"


def call(number: str = LONG, name: str = "f") -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": "{}"}}


def calling(*calls: dict[str, Any], **fields: Any) -> Message:
    return {"role": "assistant", **fields, "tool_calls": list(calls or [call()])}


def result(number: str = LONG, content: str = "1") -> Message:
    return said("tool", content, tool_call_id=number)


def roles(messages: list[Message]) -> list[tuple[str, Any]]:
    return [(message["role"], message.get("content")) for message in messages]


def test_messages_that_are_taken_are_not_touched() -> None:
    messages = [BRIEF, KIND, USER, MORE, calling(content=""), result(), HI, BRIEF, HI]
    assert formed(messages, MessageRules()) == messages
    strict = MessageRules(
        several_systems=False,
        late_system=False,
        repeated_turns=False,
        assistant_first=False,
        no_user=False,
        single_part=("assistant",),
        parallel_calls=False,
        no_content=False,
        no_content_beside_calls=False,
        short_ids=True,
    )
    messages = [BRIEF, USER, calling(call("abcdefgh1"), content=""), result("abcdefgh1"), HI, MORE]
    assert formed(messages, strict) == messages


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_that_come_late_are_moved_to_the_front(role: str) -> None:
    late = said(role, parts("Be kind.", "Be glad."))
    first = MessageRules(several_systems=False, late_system=False)
    assert formed([BRIEF, USER, HI, late, MORE], first) == [
        said("system", "Be brief.\n\nBe kind.\nBe glad."),
        USER,
        HI,
        MORE,
    ]
    assert formed([USER, late], first) == [late, USER]
    assert formed([BRIEF, KIND, USER], MessageRules(late_system=False)) == [BRIEF, KIND, USER]
    assert formed([BRIEF, KIND, USER], MessageRules(several_systems=False)) == [
        said("system", "Be brief.\n\nBe kind."),
        USER,
    ]


def test_instructions_are_the_users_where_results_hide_them() -> None:
    hidden = MessageRules(system_beside_results=False)
    result = said("tool", "Sunny.")
    assert roles(formed([BRIEF, USER, HI, result], hidden))[0] == ("user", "Be brief.\n\nHello!")
    assert formed([BRIEF, USER, HI, result, MORE], hidden) == [BRIEF, USER, HI, result, MORE]


def test_instructions_are_the_users_where_no_system_message_is_taken() -> None:
    none = MessageRules(system=False, several_systems=False, late_system=False)
    assert roles(formed([BRIEF, USER, HI, KIND, MORE], none)) == [
        ("user", "Be brief.\n\nBe kind.\n\nHello!"),
        ("assistant", "Hi."),
        ("user", "Again!"),
    ]
    assert roles(formed([BRIEF], none)) == [("user", "Be brief.")]
    assert roles(formed([BRIEF, HI, USER], none)) == [("user", "Be brief."), ("assistant", "Hi."), ("user", "Hello!")]


def test_user_and_assistant_take_turns() -> None:
    turns = MessageRules(repeated_turns=False, assistant_first=False)
    assert roles(formed([USER, MORE, HI, HI, MORE], turns)) == [
        ("user", "Hello!\n\nAgain!"),
        ("assistant", "Hi.\n\nHi."),
        ("user", "Again!"),
    ]
    assert roles(formed([BRIEF, HI, USER], turns))[1:] == [("user", ""), ("assistant", "Hi."), ("user", "Hello!")]
    # A result and the user's text behind it stay two turns, as the model has seen them in training.
    assert roles(formed([USER, calling(), result(), MORE], turns))[2:] == [
        ("tool", "1"),
        ("assistant", ""),
        ("user", "Again!"),
    ]
    assert roles(formed([USER, calling(), result(), HI, MORE], turns))[2:] == [
        ("tool", "1"),
        ("assistant", "Hi."),
        ("user", "Again!"),
    ]


def test_a_conversation_without_a_user_gets_an_empty_turn() -> None:
    rules = MessageRules(no_user=False)
    assert roles(formed([BRIEF], rules)) == [("system", "Be brief."), ("user", "")]
    assert roles(formed([BRIEF, HI], rules)) == [("system", "Be brief."), ("user", ""), ("assistant", "Hi.")]
    assert formed([HI, USER], rules) == [HI, USER]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_calls_without_a_text_have_the_content_that_is_taken(content: dict[str, Any]) -> None:
    def form(**rules: bool) -> Message:
        (message,) = formed([calling(**content)], MessageRules(**rules))  # type: ignore[arg-type]
        return message

    null = form(null_beside_calls=True, no_content_beside_calls=False, empty_beside_calls=False)
    assert null == calling(content=None)
    assert not form(no_content_beside_calls=False)["content"]
    assert "content" not in form(empty_beside_calls=False)


def test_a_text_that_hides_calls_becomes_a_message_of_its_own() -> None:
    rules = MessageRules(text_beside_calls=False, null_beside_calls=True)
    messages = formed([calling(content="Wait.", reasoning="Hm.")], rules)
    assert roles(messages) == [("assistant", "Wait."), ("assistant", None)]
    assert (messages[0]["reasoning"], messages[1]["tool_calls"]) == ("Hm.", [call()])
    assert "reasoning" not in messages[1]


def test_a_text_joins_the_reasoning_where_both_are_not_taken_beside_calls() -> None:
    rules = MessageRules(reasoning_beside_text_and_calls=False)
    (message,) = formed([calling(content="Wait.", thinking="Hm.")], rules)
    assert (message["thinking"], message["reasoning_content"]) == ("Hm.\n\nWait.",) * 2
    assert "content" not in message
    assert formed([calling(content="Wait.")], rules) == [calling(content="Wait.")]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_reaches_a_template_that_reads_another_key(key: str) -> None:
    (message,) = formed([said("assistant", "Hi.", **{key: "Hm."})], MessageRules(reasoning=True))
    assert (message["reasoning_content"], message["reasoning"], message["thinking"]) == ("Hm.",) * 3


def test_parallel_calls_are_made_one_by_one() -> None:
    calls = [call("a"), call("b"), call("c")]
    messages = [USER, calling(*calls, content="Wait."), result("b", "2"), result("x", "?"), result("a", "1"), MORE]
    texts = formed(messages, MessageRules(parallel_calls=False))
    ids = [[each["id"] for each in message.get("tool_calls", ())] or message.get("tool_call_id") for message in texts]
    assert ids == [None, ["a"], "a", ["b"], "b", ["c"], "x", None]
    assert [message.get("content") for message in texts] == ["Hello!", "Wait.", "1", None, "2", None, "?", "Again!"]


def test_ids_are_rewritten_alike_in_a_call_and_its_result() -> None:
    rules = MessageRules(short_ids=True)
    _, first, answer = formed([USER, calling(call("toolu_é"), call("abcdefgh1")), result("toolu_é")], rules)
    own, short = (each["id"] for each in first["tool_calls"])
    assert (len(own), own.isalnum(), own.isascii()) == (9, True, True)
    assert answer["tool_call_id"] == own
    assert short == "abcdefgh1"


def test_ids_are_numbered_over_the_conversation() -> None:
    turns = [
        USER,
        calling(call("x"), call("y")),
        result("y"),
        result("x"),
        calling(call("x")),
        result("x"),
        result("z"),
    ]
    numbered = formed(turns, MessageRules(numbered_ids=True))
    assert [each["id"] for message in numbered for each in message.get("tool_calls", ())] == [
        f"functions.f:{number}" for number in range(3)
    ]
    results = [message["tool_call_id"] for message in numbered if message["role"] == "tool"]
    assert results == ["functions.f:1", "functions.f:0", "functions.f:2", "z"]
    odd = [{"role": "assistant", "tool_calls": [{"id": ["x"]}, {"id": "y", "function": None}]}, result("y"), USER]
    assert formed(odd, MessageRules(numbered_ids=True)) == odd


def test_parts_are_joined_where_only_the_first_is_shown() -> None:
    rules = MessageRules(single_part=("assistant",))
    messages = [said("user", parts("a", "b")), said("assistant", parts("a", "b")), said("assistant", parts("a"))]
    assert [message["content"] for message in formed(messages, rules)] == [parts("a", "b"), "a\nb", parts("a")]
