import json
from pathlib import Path

import pytest

from pagewire.commands.chat.commands import COMMANDS, HELP, Action, Ask, Exit, Save, Show, interpret, is_open
from pagewire.commands.chat.conversation import Conversation
from pagewire.shared.errors import InvalidRequest


def shown(conversation: Conversation, line: str) -> str:
    action = interpret(conversation, line)
    assert isinstance(action, Show)
    return action.text


@pytest.mark.parametrize(
    ("entered", "action"),
    [
        ("Hello there", Ask("Hello there")),
        ("  Hello\nthere \n", Ask("Hello\nthere")),
        ('"""two\nlines"""', Ask("two\nlines")),
        ('"""\n  indented\n/help\n"""', Ask("  indented\n/help")),
        ("/etc/passwd is what?", Ask("/etc/passwd is what?")),
        ("/exit", Exit()),
        (" /help ", Show(HELP)),
    ],
)
def test_an_input_is_a_message_or_a_command(entered: str, action: Action) -> None:
    assert interpret(Conversation(), entered) == action


@pytest.mark.parametrize(
    ("text", "opened"),
    [
        ("one line", False),
        ('"""', True),
        ('""""', True),
        ('"""begun\n', True),
        ('""""""', False),
        ('"""closed"""', False),
        ('"""closed\n""" ', False),
        ('quotes """ inside', False),
    ],
)
def test_open_quotes_keep_the_line_open(text: str, opened: bool) -> None:
    assert is_open(text) is opened


def test_the_system_message_is_set_and_removed() -> None:
    conversation = Conversation()
    shown(conversation, "/system Answer in French.")
    assert conversation.system == "Answer in French."
    shown(conversation, '/system """two\nlines"""')
    assert conversation.system == "two\nlines"
    assert "no system message" in shown(conversation, "/system")
    assert not conversation.system


def test_parameters_are_set_listed_and_left_to_the_model() -> None:
    conversation = Conversation(sampling={"max_tokens": 512})
    assert shown(conversation, "/set temperature 0.2") == "temperature: 0.2"
    assert shown(conversation, '/set stop ["a b", "c"]') == 'stop: ["a b","c"]'
    listed = shown(conversation, "/set").splitlines()
    assert listed[:3] == ["max_tokens: 512", "temperature: 0.2", 'stop: ["a b","c"]']
    assert "top_p" in listed[3]
    assert "temperature" not in listed[3]
    shown(conversation, "/set temperature default")
    assert "temperature" not in conversation.sampling


def test_a_reset_forgets_the_turns() -> None:
    conversation = Conversation()
    conversation.ask("Hi")
    shown(conversation, "/reset")
    assert conversation.messages() == []


def test_a_chat_is_saved_as_its_messages() -> None:
    conversation = Conversation(system="Be brief.")
    conversation.ask("Grüße")
    action = interpret(conversation, "/save  my file.json")
    assert isinstance(action, Save)
    assert action.file == Path("my file.json")
    assert json.loads(action.text) == conversation.messages()


@pytest.mark.parametrize(
    ("entered", "said"),
    [
        ("/bye", "there is no command /bye: /help lists them"),
        ("/", "there is no command /:"),
        ("/save", "name a file"),
        ("/set temperature", "give temperature a value, or default"),
        ("/set seed default", "seed is not set"),
        ("/set temperature hot", "expected `float`"),
    ],
)
def test_an_invalid_command_is_refused(entered: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        interpret(Conversation(), entered)


def test_the_help_names_every_command() -> None:
    assert all(f"/{name} " in HELP for name in COMMANDS)
