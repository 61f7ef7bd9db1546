"""The `pagewire` command; each subcommand is a module of `pagewire.commands`."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import UnsupportedOperation


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code. An error is one line on standard error and exit code 2."""
    try:
        # Imported here, so that Ctrl-C during the imports ends the command without a traceback too.
        from pagewire.commands.parser import build_parser, load
        from pagewire.shared.errors import PagewireError

        try:
            namespace = build_parser().parse_args(arguments)
            return load(namespace.command).run(namespace)
        except PagewireError as error:
            print(f"pagewire: {error}", file=sys.stderr)
            return 2
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # what cannot be written shows here, not at the end of the interpreter
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output, such as `head`, has had enough
        _drop_output()
        return 141
    except OSError as error:
        _drop_output()
        place = f": {error.filename}" if error.filename else ""
        print(f"pagewire: {error.strerror or error}{place}", file=sys.stderr)
        return 2


def _drop_output() -> None:
    """Lets standard output take what is left in its buffer, which nobody can read."""
    with suppress(UnsupportedOperation):  # it is no file, as in a test
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
