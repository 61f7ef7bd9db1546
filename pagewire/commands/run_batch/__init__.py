"""Runs the requests of a file in OpenAI's batch format, and writes a file with their answers.

Lines of the input are `{"custom_id", "method": "POST", "url": "/v1/chat/completions", "body": {...}}`, of the output
`{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`, in the order in which they end.
The requests go to the running stack, or to one that is started for them; the exit code is 1 if any has failed.
"""

import argparse
from pathlib import Path

from pagewire.commands import session
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.settings import flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the files and all settings."""
    parser.add_argument("-i", "--input-file", type=Path, required=True, metavar="FILE", help="requests, one a line")
    parser.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE", help="file for the answers")
    parser.add_argument("--concurrency", type=int, default=64, metavar="N", help="requests at once (default: 64)")
    flags.add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Shows a bar on a terminal, and says at the end how many requests have failed."""
    from pagewire.commands.run_batch import (
        batch,  # only here: the routes take longer to import than other commands to run
    )

    settings = session.quiet(flags.read_settings(arguments))
    lines = batch.read(arguments.input_file)
    if arguments.output_file.exists() and arguments.output_file.samefile(arguments.input_file):
        raise ConfigurationError(f"{arguments.output_file} has the requests: choose another file for the answers")
    try:
        output = arguments.output_file.open("w")
    except OSError as error:
        raise ConfigurationError(f"cannot write {arguments.output_file}: {error.strerror}") from error
    with output:
        return session.run(batch.answer_all(lines, output, max(1, arguments.concurrency), settings), settings)
