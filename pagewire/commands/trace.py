"""Draws the spans of a request, which the services have written to --trace-dir, or lists the slowest requests."""

import argparse
from pathlib import Path

from pagewire.commands import waterfall
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


def run(given: argparse.Namespace) -> int:
    """Prints one line per span, or one per slow request."""
    folder = flags.read_settings(given).trace_dir
    if not folder:
        raise ConfigurationError(
            "no folder of spans is configured: give --trace-dir FOLDER to this command and to `pagewire serve`"
        )
    if (given.request_id is None) == (given.slowest is None):
        raise ConfigurationError("give either the id of a request or --slowest N")
    if given.slowest is not None:
        print("\n".join(waterfall.table(waterfall.slowest(span_files.read(Path(folder)), given.slowest))))
        return 0
    found = waterfall.of_request(span_files.read(Path(folder)), given.request_id)
    if not found:
        raise ConfigurationError(f"{folder} has no spans of request {given.request_id}")
    print("\n".join(waterfall.draw(found)))
    return 0
