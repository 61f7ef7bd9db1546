"""The command-line flags, one per setting. Names, types and help texts come from `settings.config.Settings`."""

import argparse
import ast
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec.structs import FieldInfo
from typing_extensions import override

from pagewire.shared.settings import config, vllm_flags
from pagewire.shared.settings.config import FIELDS, Settings
from pagewire.shared.settings.vllm_flags import IGNORED, instead

ALIASES = {"num-scheduler-steps": "lease-window", **vllm_flags.ALIASES}
"""Settings by their other flags."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors say what replaces a flag of vLLM's."""

    @override
    def error(self, message: str) -> NoReturn:
        unknown = re.findall(r"(?<![\w-])--([a-z0-9][a-z0-9-]*)", message) if "unrecognized" in message else ()
        hints = [f"--{name}: {instead(name)}" for name in unknown]
        super().error("; ".join([message, *hints]))


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
        elif name == "served-model-name":
            group.add_argument(*flags, nargs="+", metavar="NAME", **options)
        else:
            group.add_argument(*flags, metavar=name.rsplit("-", 1)[-1].upper(), **options)
    for name in IGNORED:
        group.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)


def read_settings(namespace: argparse.Namespace) -> Settings:
    """Combines parsed flags, environment variables, configuration file and defaults into settings.

    Raises:
        ConfigurationError: a setting is invalid.
    """
    arguments: dict[str, Any] = vars(namespace)
    flags = {name: arguments[field.name] for name, field in FIELDS.items() if field.name in arguments}
    if isinstance(names := flags.get("served-model-name"), list):
        # `--served-model-name NAME MODEL`: the parser cannot know that the last one is the command's own argument.
        if len(names) > 1 and "model" in arguments.get("positional", ()) and "model" not in flags:
            flags["model"] = names.pop()
        flags["served-model-name"] = ",".join(names)
    return config.load(flags, config=arguments.get("config"))


def default_text(field: FieldInfo) -> str:
    """Returns a setting's default as the end of its description; empty if the description states it."""
    if field.default in (None, "", msgspec.NODEFAULT) or isinstance(field.default, bool):
        return " (default: on)" if field.default is True else ""
    return f" (default: {field.default})"


@cache
def describe(fields: type) -> dict[str, str]:
    """Returns the docstring of each field of a class, read from the source, where it follows the field."""
    (body,) = ast.parse(inspect.getsource(fields)).body
    assert isinstance(body, ast.ClassDef)
    lines: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(line))):
                lines[name] = line
    return lines
