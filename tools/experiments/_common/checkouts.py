"""Runs programs of other versions: those of a checkout, such as a worktree of git."""

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.process.linux_process import die_with
from pagewire.shared.settings.environment import PREFIX

HERE = Path(__file__).resolve().parents[3]
"""The checkout that this file is in."""


def command(module: str, *arguments: str) -> Sequence[str]:
    """Returns the command that runs a module of whichever checkout `options` names."""
    return (sys.executable, "-P", "-m", module, *arguments)


def options(checkout: Path, **settings: object) -> dict[str, Any]:
    """Returns the options of a subprocess that runs a module of a checkout with these settings.

    Raises:
        ConfigurationError: the folder has no such package.
    """
    if not (checkout / "pagewire" / "__main__.py").is_file():
        raise ConfigurationError(f"{checkout} is no checkout: name a folder that contains pagewire/__main__.py")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    own = {f"{PREFIX}{name.upper()}": str(value) for name, value in settings.items()}
    return {
        "env": inherited | own | {"PYTHONPATH": str(checkout.absolute())},
        "preexec_fn": partial(die_with, os.getpid()),
    }
