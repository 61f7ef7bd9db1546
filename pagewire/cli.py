"""The `pagewire` command; each subcommand is a module of `pagewire.commands`."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Protocol

from pagewire.commands import (
    bench,
    chat,
    demo,
    doctor,
    generate,
    models,
    nats_config,
    pull,
    run_batch,
    serve,
    status,
    trace,
)
from pagewire.shared import flags
from pagewire.shared.errors import PagewireError


class Command(Protocol):
    """A module of `pagewire.commands`; the first line of its docstring is its help text."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""

    def run(self, given: argparse.Namespace) -> int:
        """Runs the command; returns the exit code."""


COMMANDS: dict[str, Command] = {
    "serve": serve,
    "generate": generate,
    "chat": chat,
    "run-batch": run_batch,
    "pull": pull,
    "models": models,
    "status": status,
    "bench": bench,
    "trace": trace,
    "doctor": doctor,
    "demo": demo,
    "nats-config": nats_config,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code. An error is one line on standard error and exit code 2."""
    given = build_parser().parse_args(arguments)
    try:
        return COMMANDS[given.command].run(given)
    except PagewireError as error:
        print(f"pagewire: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = flags.Parser(prog="pagewire", description="Serves language models as a pipeline of services over NATS.")
    parser.add_argument("--version", action="version", version=f"pagewire {version('pagewire')}")
    verbs = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        text = (command.__doc__ or "").partition("\n")[0].rstrip(".")
        command.add_arguments(verbs.add_parser(name, help=text[0].lower() + text[1:], description=command.__doc__))
    return parser
