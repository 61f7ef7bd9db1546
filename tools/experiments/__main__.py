"""Runs an experiment in a checkout: `python -m tools.experiments NAME ...`; `NAME --help` shows its arguments.

An experiment made one table or one picture of the documents, and `report` writes them all from bench/results. What a
user measures again is `pagewire bench`.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from pagewire.shared.errors import PagewireError
from tools.experiments._common.experiment_files import EXPERIMENTS


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the named experiment; an error is one line on standard error and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments", description=__doc__)
    parser.add_argument("name", choices=EXPERIMENTS, metavar="NAME", help=", ".join(EXPERIMENTS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the experiment")
    options = parser.parse_args(arguments)
    module = ".".join(EXPERIMENTS[options.name].with_suffix("").parts)
    try:
        code: int = importlib.import_module(module).main(options.arguments)
    except PagewireError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
