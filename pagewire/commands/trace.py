"""Draws the waterfall of one request, from the spans that the services wrote to --trace-dir."""

import argparse
from pathlib import Path

from pagewire.commands import waterfall
from pagewire.shared import flags, spans
from pagewire.shared.errors import ConfigurationError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which request, and every setting."""
    parser.add_argument("request_id", metavar="REQUEST_ID", help="the id on the request's frames")
    flags.add_settings(parser)


def run(given: argparse.Namespace) -> int:
    """Prints one line per span."""
    folder = flags.read_settings(given).trace_dir
    if not folder:
        raise ConfigurationError(
            "name the folder that the stack writes spans to: --trace-dir FOLDER, here and at serve"
        )
    found = waterfall.of_request(spans.read(Path(folder)), given.request_id)
    if not found:
        raise ConfigurationError(f"{folder} has no spans of request {given.request_id}")
    print("\n".join(waterfall.draw(found)))
    return 0
