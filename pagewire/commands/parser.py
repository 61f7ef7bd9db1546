"""The command line: its parser, which imports the module of a command only for that command."""

import argparse
import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

from typing_extensions import override

from pagewire.shared.settings import flags


class Command(Protocol):
    """A module of `pagewire.commands`; the first line of its docstring is its help text."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Runs the command; returns the exit code."""


COMMANDS = (
    "serve",
    "generate",
    "chat",
    "run-batch",
    "pull",
    "models",
    "status",
    "bench",
    "trace",
    "doctor",
    "demo",
    "nats-config",
    "completion",
)


OTHER_COMMANDS = {
    "run": "`pagewire chat --model NAME` talks with a model, `pagewire generate TEXT` continues a text",
    "list": "`pagewire models` lists the models",
    "ls": "`pagewire models` lists the models",
    "ps": "`pagewire status` shows what runs",
    "stop": "press Ctrl-C at `pagewire serve`, or send it SIGTERM",
    "rm": "`pagewire models --remove NAME` deletes a fetched model",
    "show": "`pagewire doctor --model NAME` describes a model",
}
"""Commands of Ollama, and what does the same here."""


class CommandLine(flags.Parser):
    """The parser of the whole line, which knows the commands of Ollama."""

    @override
    def error(self, message: str) -> NoReturn:
        word, _ = flags.refused_choice(message) or ("", [])
        if word in OTHER_COMMANDS:
            argparse.ArgumentParser.error(self, f"there is no command {word}: {OTHER_COMMANDS[word]}")
        super().error(message)


class CommandParser(flags.Parser):
    """The parser of one command, which imports the command's module when it needs the arguments."""

    def __init__(self, *, command: str, **options: Any) -> None:
        super().__init__(**options)
        self._command = command

    def add_own_arguments(self) -> None:
        """Adds the command's arguments, unless they are there."""
        if self._command:
            load(self._command).add_arguments(self)
            self._command = ""

    @override
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.add_own_arguments()
        return super().parse_known_args(args, namespace)


class _Version(argparse.Action):
    """Prints the version. Reading it takes longer than all else that a command line without this flag needs."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"pagewire {version('pagewire')}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    return _build()[0]


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Returns the parser of each command with all its arguments, for which it imports every command."""
    commands = _build()[1]
    for parser in commands.values():
        parser.add_own_arguments()
    return dict(commands)


def _build() -> tuple[argparse.ArgumentParser, dict[str, CommandParser]]:
    parser = CommandLine(prog="pagewire", description="Serves language models as a pipeline of services over NATS.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    verbs = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)
    commands = {}
    for name in COMMANDS:
        text = _docstring(name)
        line = text.partition("\n")[0].rstrip(".")
        commands[name] = verbs.add_parser(name, command=name, help=line[0].lower() + line[1:], description=text)
    return parser, commands


def load(command: str) -> Command:
    """Returns the module of a command."""
    return cast("Command", import_module(_module(command)))


def _module(command: str) -> str:
    return f"pagewire.commands.{command.replace('-', '_')}"


def _docstring(command: str) -> str:
    """Returns the docstring of a command's module, read without importing the module."""
    spec = find_spec(_module(command))
    assert spec is not None
    assert spec.origin is not None
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text())) or ""
