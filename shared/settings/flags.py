"""The command-line flags, one per setting. Names, types and help texts come from `settings.config.Settings`."""

import argparse
import ast
import inspect
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec.structs import FieldInfo
from typing_extensions import override

from pagewire.shared.settings import config, vllm_flags
from pagewire.shared.settings.config import FIELDS, Settings
from pagewire.shared.settings.spelling import CLOSE, did_you_mean, nearest
from pagewire.shared.settings.vllm_flags import IGNORED, NO_COUNTERPART, instead

ALIASES = {"num-scheduler-steps": "lease-window", **vllm_flags.ALIASES}
"""Settings by their other flags."""
SEVERAL = {"served-model-name": "NAME", "lora-modules": "NAME=PATH"}
"""Settings whose flags take several values, which a comma separates in other places, and the name of a value."""
MISSPELT = 0.9
"""Similarity from which on a flag is a misspelt one of ours, although it looks like one of vLLM's."""


class Parser(argparse.ArgumentParser):
    """A parser of flags in both spellings, `--max-num-seqs` and `--max_num_seqs`, whose errors say what was meant.

    Its errors also say what replaces a flag of vLLM's. It takes no abbreviations.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    @override
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = [_with_dashes(word) for word in (sys.argv[1:] if args is None else args)]
        namespace, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    @override
    def error(self, message: str) -> NoReturn:
        hints = []
        if "unrecognized" in message:
            unknown = re.findall(r"(?<![\w-])--([a-z0-9][a-z0-9-]*)", message)
            hints = [f"--{name}: {self._hint(name)}" for name in unknown]
        elif (choice := refused_choice(message)) is not None:
            word, choices = choice
            message = f"there is no {word!r}{did_you_mean(word, choices)}"
            hints = [f"choose from {', '.join(choices)}"]
        super().error("; ".join([message, *hints]))

    def _hint(self, name: str) -> str:
        """Returns the advice for an unknown flag: a misspelt one of ours comes before one of vLLM's."""
        flags = [flag[2:] for flag in self._option_string_actions if flag.startswith("--")]
        replacement = instead(name)
        cutoff = CLOSE if replacement == NO_COUNTERPART else MISSPELT
        other = nearest(name, flags, cutoff)
        return f"did you mean --{other}?" if other is not None else replacement


def _with_dashes(word: str) -> str:
    """Returns a flag in the spelling with dashes; another word stays.

    >>> _with_dashes("--max_num_seqs=4"), _with_dashes("a_b"), _with_dashes("--stop=a_b")
    ('--max-num-seqs=4', 'a_b', '--stop=a_b')
    """
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if re.fullmatch(r"--[a-z][\w-]*", name) else word


def refused_choice(message: str) -> tuple[str, list[str]] | None:
    """Returns the refused word and the possible ones of argparse's error about a choice; None: it is another error.

    >>> refused_choice("argument COMMAND: invalid choice: 'srve' (choose from 'serve', 'chat')")
    ('srve', ['serve', 'chat'])
    """
    parts = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message, re.DOTALL)
    return (parts[1], re.findall(r"[\w.-]+", parts[2])) if parts is not None else None


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every setting, and `--config`."""
    group = parser.add_argument_group("settings", "each can be an environment variable too, as PAGEWIRE_MAX_NUM_SEQS")
    group.add_argument("--config", type=Path, metavar="FILE", help="TOML or YAML file with settings")
    descriptions = describe(Settings)
    for name, field in FIELDS.items():
        flags = [f"--{name}", *(f"--{other}" for other, ours in ALIASES.items() if ours == name)]
        text = (descriptions[field.name] + default_text(field)).replace("%", "%%")
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text, "dest": field.name}
        if field.type is bool:
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
        elif name in SEVERAL:
            group.add_argument(*flags, nargs="+", metavar=SEVERAL[name], **options)
        else:
            group.add_argument(*flags, metavar=name.rsplit("-", 1)[-1].upper(), **options)
    for name in IGNORED:
        group.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)


def read_settings(namespace: argparse.Namespace) -> Settings:
    """Combines parsed flags, environment variables, configuration file and defaults into settings.

    Raises:
        ConfigurationError: a setting is invalid.
    """
    return config.load(given_flags(namespace), config=vars(namespace).get("config"))


def read_models(namespace: argparse.Namespace) -> list[Settings]:
    """Returns the settings of each model that a command serves, whose argument `models` names them.

    Raises:
        ConfigurationError: a setting is invalid.
    """
    flags, models = given_flags(namespace), list(namespace.models)
    named = config.names_model(flags, config=vars(namespace).get("config"))
    for name in SEVERAL:
        values = vars(namespace).get(FIELDS[name].name) or []
        if not models and not named and len(values) > 1 and _is_model(values[-1]):
            # `--served-model-name NAME MODEL`: the parser cannot know that the last one is the command's own argument.
            models, flags[name] = [values[-1]], ",".join(values[:-1])
    return config.load_models(models, flags, config=vars(namespace).get("config"))


def _is_model(value: str) -> bool:
    """Returns whether the last value of a flag with several can be a model: no adapter is one."""
    return "=" not in value and not value.startswith(("{", "["))


def given_flags(namespace: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that parsed flags have, by kebab-case name."""
    arguments: dict[str, Any] = vars(namespace)
    flags = {name: arguments[field.name] for name, field in FIELDS.items() if field.name in arguments}
    return flags | {name: ",".join(flags[name]) for name in SEVERAL if isinstance(flags.get(name), list)}


def default_text(field: FieldInfo) -> str:
    """Returns a setting's default as the end of its description; empty if the description states it."""
    if field.default in (None, "", msgspec.NODEFAULT) or isinstance(field.default, bool):
        return " (default: on)" if field.default is True else ""
    return f" (default: {field.default})"


@cache
def describe(fields: type) -> dict[str, str]:
    """Returns the docstring of each field of a class, read from the source, where it follows the field."""
    lines: dict[str, str] = {}
    for part in reversed([part for part in fields.__mro__ if part.__module__ == fields.__module__]):
        (body,) = ast.parse(inspect.getsource(part)).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(line))):
                    lines[name] = line
    return lines
