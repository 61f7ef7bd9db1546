"""The command-line flags, one per setting. Names, types and help texts come from `pagewire.shared.config.Settings`."""

import argparse
import ast
import inspect
from pathlib import Path
from typing import Any

from pagewire.shared import config
from pagewire.shared.config import FIELDS, Settings


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every setting, and `--config`."""
    group = parser.add_argument_group("settings", "each can be an environment variable too, as PAGEWIRE_MAX_NUM_SEQS")
    group.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
    descriptions = describe(Settings)
    for name, field in FIELDS.items():
        flags = [f"--{name}", "--num-scheduler-steps"] if name == "lease-window" else [f"--{name}"]
        text = descriptions[field.name].replace("%", "%%")
        if field.type is bool:
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            metavar = name.rsplit("-", 1)[-1].upper()
            group.add_argument(*flags, default=argparse.SUPPRESS, metavar=metavar, help=text, dest=field.name)


def read_settings(namespace: argparse.Namespace) -> Settings:
    """Combines parsed flags, environment variables, configuration file and defaults into settings.

    Raises:
        ConfigurationError: a setting is invalid.
    """
    given: dict[str, Any] = vars(namespace)
    flags = {name: given[field.name] for name, field in FIELDS.items() if field.name in given}
    return config.load(flags, config=given.get("config"))


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
