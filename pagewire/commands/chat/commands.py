"""Interprets the user's input: a message to the model, or a command that begins with a slash."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pagewire.commands.chat.conversation import PARAMETERS, Conversation
from pagewire.shared.errors import InvalidRequest

QUOTES = '"""'
"""Begins and ends a message of several lines."""
DEFAULT = "default"
"""Value of `/set` that restores the model's own value."""
HELP = """\
/system TEXT      set the system message; without TEXT, remove it
/set NAME VALUE   set a sampling parameter, such as /set temperature 0.2; VALUE default: the model's own
/set              list what is set
/reset            forget the conversation
/save FILE        write the conversation to a JSON file
/help             show this
/exit             leave; so does Ctrl-D

\"\"\" begins and ends a message of several lines; Alt-Enter (or Esc, then Enter) begins a new line.
Ctrl-C stops an answer."""

_COMMAND = re.compile(r"/(\w*)(?:\s+(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Ask:
    """Send `text` to the model."""

    text: str


@dataclass(frozen=True, slots=True)
class Show:
    """Show `text` to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Save:
    """Write `text` to `file`."""

    file: Path
    text: str


@dataclass(frozen=True, slots=True)
class Exit:
    """End the chat."""


Action = Ask | Show | Save | Exit


def is_open(text: str) -> bool:
    """Returns whether a message of several lines is not closed yet, so that Enter begins a new line."""
    text = text.strip()
    return text.startswith(QUOTES) and not (text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES))


def interpret(conversation: Conversation, entered: str) -> Action:
    """Applies a command to the conversation; returns the remaining action.

    Raises:
        InvalidRequest: there is no such command, or its argument is invalid.
    """
    text = entered.strip()
    if text.startswith(QUOTES):
        return Ask(text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n"))
    command = _COMMAND.fullmatch(text)
    if command is None:
        return Ask(text)
    name, argument = command[1], (command[2] or "").strip()
    if name not in COMMANDS:
        raise InvalidRequest(f"there is no command /{name}: /help lists them")
    return COMMANDS[name](conversation, argument)


def _system(conversation: Conversation, text: str) -> Action:
    conversation.system = text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return Show("the system message is set" if text else "there is no system message any more")


def _set(conversation: Conversation, argument: str) -> Action:
    name, _, value = argument.partition(" ")
    if not name:
        return Show(_parameters(conversation))
    if not value.strip():
        raise InvalidRequest(f"give {name} a value, or {DEFAULT}")
    if value.strip() == DEFAULT:
        conversation.unset(name)
        return Show(f"{name}: the model's own")
    conversation.set(name, value.strip())
    return Show(f"{name}: {_shown(conversation.sampling[name])}")


def _parameters(conversation: Conversation) -> str:
    changed = [f"{name}: {_shown(value)}" for name, value in conversation.sampling.items()]
    others = [name for name in PARAMETERS if name not in conversation.sampling]
    return "\n".join([*changed, f"the model's own: {', '.join(others)}"])


def _shown(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _reset(conversation: Conversation, _: str) -> Action:
    conversation.reset()
    return Show("the conversation is forgotten")


def _save(conversation: Conversation, argument: str) -> Action:
    if not argument:
        raise InvalidRequest("name a file: /save FILE")
    messages = msgspec.json.format(msgspec.json.encode(conversation.messages()), indent=2).decode()
    return Save(Path(argument).expanduser(), messages + "\n")


def _help(_: Conversation, __: str) -> Action:
    return Show(HELP)


def _exit(_: Conversation, __: str) -> Action:
    return Exit()


COMMANDS: dict[str, Callable[[Conversation, str], Action]] = {
    "system": _system,
    "set": _set,
    "reset": _reset,
    "save": _save,
    "help": _help,
    "exit": _exit,
}
"""The commands by name. Each gets the conversation and the argument."""
