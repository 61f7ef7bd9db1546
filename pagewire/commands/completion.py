"""Prints the script that completes commands, flags and their values in a shell.

bash:  source <(pagewire completion bash)                                        # in ~/.bashrc
zsh:   pagewire completion zsh > "${fpath[1]}/_pagewire"
fish:  pagewire completion fish > ~/.config/fish/completions/pagewire.fish
"""

import argparse
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args, get_origin

from pagewire.commands.parser import parsers
from pagewire.shared.settings.config import FIELDS

HELP_WIDTH = 76
"""Maximum characters of a help text."""


@dataclass(frozen=True)
class Option:
    """A flag of a command.

    Attributes:
        flags: its spellings.
        text: its help.
        takes_value: whether a value follows.
        values: the values that it may have; empty: any.
    """

    flags: Sequence[str]
    text: str
    takes_value: bool
    values: Sequence[str] = ()


@dataclass(frozen=True)
class Verb:
    """A command.

    Attributes:
        text: its help.
        arguments: the values that its first argument may have; empty: any.
    """

    name: str
    text: str
    arguments: Sequence[str]
    options: Sequence[Option]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the name of the shell."""
    parser.add_argument("shell", choices=sorted(SHELLS), metavar="SHELL", help=", ".join(sorted(SHELLS)))


def run(arguments: argparse.Namespace) -> int:
    """Prints the script."""
    print(SHELLS[arguments.shell](list(verbs(parsers()))))
    return 0


def verbs(commands: Mapping[str, argparse.ArgumentParser]) -> Iterator[Verb]:
    """Yields every command."""
    for name, parser in commands.items():
        actions = [action for action in parser._actions if action.help != argparse.SUPPRESS]
        arguments = next((action for action in actions if not action.option_strings), None)
        yield Verb(
            name,
            _short(parser.description),
            _values(arguments) if arguments is not None else (),
            [
                Option(action.option_strings, _short(action.help), action.nargs != 0, _values(action))
                for action in actions
                if action.option_strings
            ],
        )


def bash(commands: Sequence[Verb]) -> str:
    """Returns the script for bash. Words without a completion are completed with files."""
    words = [f'"" ) words="{" ".join(verb.name for verb in commands)} --help --version" ;;']
    for verb in commands:
        free = []
        for option in verb.options:
            patterns = [f'"{verb.name} {flag}"' for flag in option.flags]
            if option.values:
                words.append(f'{"|".join(patterns)} ) words="{" ".join(option.values)}" ;;')
            elif option.takes_value:
                free += patterns
        if free:
            words.append(f"{'|'.join(free)} ) ;;")
        flags = " ".join(flag for option in verb.options for flag in option.flags)
        words.append(f'"{verb.name} "* ) words="{" ".join(verb.arguments)}"; [[ $word == -* ]] && words="{flags}" ;;')
    cases = "\n".join(f"        {line}" for line in words)
    return f"""\
_pagewire() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD - 1]}}" words=""
    local place="${{COMP_WORDS[1]}} $before"
    (( COMP_CWORD == 1 )) && place=""
    case "$place" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _pagewire pagewire"""


def zsh(commands: Sequence[Verb]) -> str:
    """Returns the script for zsh."""
    named = "\n".join(f"        {shlex.quote(f'{verb.name}:{verb.text}')}" for verb in commands)
    cases = []
    for verb in commands:
        lines = []
        for option in verb.options:
            text = option.text.translate({ord(mark): f"\\{mark}" for mark in "[]:"})
            value = f":value:{_zsh_values(option.values)}" if option.takes_value else ""
            lines += [shlex.quote(f"{flag}[{text}]{value}") for flag in option.flags]
        lines.append(shlex.quote(f"*::argument:{_zsh_values(verb.arguments)}"))
        cases.append(f"    {verb.name}) _arguments {' '.join(lines)} ;;")
    return f"""\
#compdef pagewire
_pagewire() {{
    local -a commands=(
{named}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    shift words
    (( CURRENT-- ))
    case $words[1] in
{chr(10).join("    " + case for case in cases)}
    esac
}}
if [ "$funcstack[1]" = _pagewire ]; then _pagewire "$@"; else compdef _pagewire pagewire; fi"""


def fish(commands: Sequence[Verb]) -> str:
    """Returns the script for fish."""
    lines = ["complete -c pagewire -n __fish_use_subcommand -l version"]
    for verb in commands:
        lines.append(f"complete -c pagewire -n __fish_use_subcommand -f -a {verb.name} -d {_fish(verb.text)}")
        here = f"complete -c pagewire -n '__fish_seen_subcommand_from {verb.name}'"
        if verb.arguments:
            lines.append(f"{here} -f -a {_fish(' '.join(verb.arguments))}")
        for option in verb.options:
            names = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
            value = f" -x -a {_fish(' '.join(option.values))}" if option.values else " -r" if option.takes_value else ""
            lines.append(f"{here} {names}{value} -d {_fish(option.text)}")
    return "\n".join(lines)


SHELLS = {"bash": bash, "fish": fish, "zsh": zsh}


def _values(action: argparse.Action) -> Sequence[str]:
    """Returns the values that an argument may have: its choices, or its setting's."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    kind = next((field.type for field in FIELDS.values() if field.name == action.dest), None)
    return [str(value) for value in get_args(kind)] if get_origin(kind) is Literal else ()


def _short(text: str | None) -> str:
    first = (text or "").partition("\n")[0].replace("%%", "%")
    return textwrap.shorten(first.replace("`", ""), HELP_WIDTH, placeholder=" ...")


def _zsh_values(values: Sequence[str]) -> str:
    return f"({' '.join(values)})" if values else "_files"


def _fish(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
