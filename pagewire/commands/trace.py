"""Draws the spans of one request, which the services have written to --trace-dir, as a waterfall."""

import argparse
from pathlib import Path

from pagewire.commands import waterfall
from pagewire.shared import flags, spans
from pagewire.shared.errors import ConfigurationError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the request's id and all settings."""
    parser.add_argument("request_id", metavar="REQUEST_ID", help="id of the request, as in its frames")
    flags.add_settings(parser)


def run(given: argparse.Namespace) -> int:
    """Prints one line per span."""
    folder = flags.read_settings(given).trace_dir
    if not folder:
        raise ConfigurationError(
            "no folder of spans is configured: give --trace-dir FOLDER to this command and to `pagewire serve`"
        )
    found = waterfall.of_request(spans.read(Path(folder)), given.request_id)
    if not found:
        raise ConfigurationError(f"{folder} has no spans of request {given.request_id}")
    print("\n".join(waterfall.draw(found)))
    return 0
