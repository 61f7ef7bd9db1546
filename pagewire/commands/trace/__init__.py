"""Draws the spans of a request, which the services have written to --trace-dir, or lists the slowest requests."""

import argparse
from pathlib import Path

from pagewire.commands.trace import waterfall
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.settings import flags
from pagewire.shared.telemetry import span_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the request's id, the number of slowest requests, and all settings."""
    parser.add_argument(
        "request_id", metavar="REQUEST_ID", nargs="?", help="id of the request, as in its frames or its HTTP answer"
    )
    parser.add_argument("--slowest", type=int, metavar="N", help="list the N requests that took longest instead")
    flags.add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints one line per span, or one per slow request."""
    folder = flags.read_settings(arguments).trace_dir
    if not folder:
        raise ConfigurationError(
            "no folder of spans is configured: give --trace-dir FOLDER to this command and to `pagewire serve`"
        )
    if (arguments.request_id is None) == (arguments.slowest is None):
        raise ConfigurationError("give either the id of a request or --slowest N")
    if arguments.slowest is not None:
        print("\n".join(waterfall.table(waterfall.slowest(span_files.read(Path(folder)), arguments.slowest))))
        return 0
    spans = span_files.of_request(span_files.read(Path(folder)), arguments.request_id)
    if not spans:
        raise ConfigurationError(f"{folder} has no spans of request {arguments.request_id}")
    print("\n".join(waterfall.draw(spans)))
    return 0
