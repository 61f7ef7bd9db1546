"""Runs the whole stack on this machine, until SIGINT or SIGTERM."""

import argparse

from pagewire.commands import session
from pagewire.embedded.stack import Stack
from pagewire.shared import flags
from pagewire.shared.config import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and every setting."""
    text = "folder, .gguf file, hub id or short name (see `pagewire models`); without it, smollm2-135m-instruct"
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=text)
    flags.add_settings(parser)


def run(given: argparse.Namespace) -> int:
    """Prints one line on standard output once a request would be served."""
    settings = flags.read_settings(given)
    return session.run(_serve(settings), settings)


async def _serve(settings: Settings) -> int:
    async with Stack(settings) as stack:
        address = await stack.ready()
        print(f"ready {address.http} {address.nats}", flush=True)
        await stack.wait()
    return 0
