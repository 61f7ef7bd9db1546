"""The `pagewire` command; each subcommand is a module of `pagewire.commands`."""

import os
import sys
from collections.abc import Sequence

from pagewire.commands.parser import build_parser, load
from pagewire.shared.errors import PagewireError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code. An error is one line on standard error and exit code 2."""
    try:
        namespace = build_parser().parse_args(arguments)
        return load(namespace.command).run(namespace)
    except PagewireError as error:
        print(f"pagewire: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
