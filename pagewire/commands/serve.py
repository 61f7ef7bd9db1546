"""Runs the whole stack on this machine until SIGINT or SIGTERM, and then finishes the accepted requests."""

import argparse
import asyncio
from collections.abc import Sequence

import structlog

from pagewire.commands import session
from pagewire.embedded.stack import Stack
from pagewire.shared.process import device_choice
from pagewire.shared.settings import flags
from pagewire.shared.settings.config import Settings

_log = structlog.get_logger()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model and all settings."""
    text = "folder, .gguf file, hub id or short name (see `pagewire models`), of one model or of several that are "
    text += "served together; without it, smollm2-135m-instruct"
    parser.add_argument("models", nargs="*", metavar="MODEL", help=text)
    flags.add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints one line on standard output once requests can be served."""
    settings, *others = flags.read_models(arguments)
    return session.run(_serve(settings, others), settings)


async def _serve(settings: Settings, others: Sequence[Settings]) -> int:
    async with Stack(settings, others=others) as stack:
        if settings.device == device_choice.AUTO:
            _log.info("device_chosen", **device_choice.choose()._asdict())
        address = await stack.ready()
        print(" ".join(["ready", address.http, address.nats, *(stack.models if others else ())]), flush=True)
        running = asyncio.create_task(stack.wait())
        signalled = asyncio.create_task(session.first_signal().wait())
        try:
            await asyncio.wait({running, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            else:
                await stack.drain()
        finally:
            running.cancel()
            signalled.cancel()
    return 0
