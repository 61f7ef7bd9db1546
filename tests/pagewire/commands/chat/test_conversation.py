import pytest

from pagewire.commands.chat.conversation import FIXED, PARAMETERS, Conversation, as_params
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import SamplingParams


def test_turns_follow_the_system_message() -> None:
    conversation = Conversation(system="Be brief.")
    messages = conversation.ask("Hi")
    assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    conversation.answer("Hello.")
    assert conversation.ask("Bye")[2:] == [
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ]


def test_no_system_message_is_sent_by_default() -> None:
    assert Conversation().ask("Hi") == [{"role": "user", "content": "Hi"}]


def test_a_question_without_an_answer_is_removed() -> None:
    conversation = Conversation()
    conversation.ask("Hi")
    conversation.answer("")
    assert conversation.messages() == []


def test_a_reset_keeps_the_system_message_and_the_sampling() -> None:
    conversation = Conversation(system="Be brief.", sampling={"seed": 1})
    conversation.ask("Hi")
    conversation.reset()
    assert (conversation.turns, conversation.system, conversation.sampling) == ([], "Be brief.", {"seed": 1})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.2", 0.2),
        ("temperature", "1", 1.0),
        ("top_k", "40", 40),
        ("max_tokens", "null", None),
        ("ignore_eos", "true", True),
        ("stop", "END", "END"),
        ("stop", '["a", "b"]', ["a", "b"]),
        ("stop", '"7"', "7"),
        ("stop_token_ids", "[1, 2]", [1, 2]),
    ],
)
def test_a_parameter_has_the_type_of_its_field(name: str, text: str, value: object) -> None:
    conversation = Conversation()
    conversation.set(name, text)
    assert conversation.sampling == {name: value}
    assert type(conversation.sampling[name]) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("temperature", "warm", "temperature: expected `float`, got `str`"),
        ("temperature", "3", r"temperature must be in \[0, 2\]"),
        ("top_p", "0", "top_p must be above 0"),
        ("max_tokens", "0.5", "max_tokens: expected `int | null`"),
        ("warmth", "1", "there is no parameter warmth in a chat; these can be set: max_tokens"),
        ("n", "2", "there is no parameter n in a chat"),
    ],
)
def test_a_wrong_value_is_refused_and_changes_nothing(name: str, text: str, said: str) -> None:
    conversation = Conversation(sampling={"seed": 1})
    with pytest.raises(InvalidRequest, match=said.replace("|", r"\|")):
        conversation.set(name, text)
    assert conversation.sampling == {"seed": 1}


def test_an_unset_parameter_is_the_models_own_again() -> None:
    conversation = Conversation(sampling={"temperature": 0.0})
    conversation.unset("temperature")
    assert conversation.sampling == {}
    with pytest.raises(InvalidRequest, match="temperature is not set"):
        conversation.unset("temperature")


def test_every_sampling_parameter_can_be_set_or_is_fixed() -> None:
    assert {*PARAMETERS, *FIXED} == set(SamplingParams.__struct_fields__)


def test_flags_are_checked_like_typed_parameters() -> None:
    assert as_params({"temperature": 0.5}) == SamplingParams(temperature=0.5)
    with pytest.raises(InvalidRequest, match="temperature must be"):
        as_params({"temperature": -1.0})
