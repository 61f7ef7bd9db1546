"""Runs the whole stack on this machine until SIGINT or SIGTERM, and then finishes the accepted requests."""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from pagewire.commands import session
from pagewire.embedded.control import add_model
from pagewire.embedded.stack import Stack
from pagewire.shared.adapters.lora_modules import parse, with_whole_path
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.process import device_choice
from pagewire.shared.settings import flags
from pagewire.shared.settings.config import STACK_WIDE, Settings, names, without_logins
from pagewire.shared.settings.speculation import draft_model, with_draft_model

_log = structlog.get_logger()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model and all settings."""
    text = "folder, .gguf file, hub id or short name (see `pagewire models`), of one model or of several that are "
    text += "served together; without it, smollm2-135m-instruct"
    parser.add_argument("models", nargs="*", metavar="MODEL", help=text)
    text = "have the stack that runs with this --port serve the models, too, until that stack ends"
    parser.add_argument("--add", action="store_true", help=text)
    flags.add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints one line on standard output once requests can be served."""
    settings, *others = models = flags.read_models(arguments)
    if arguments.add:
        _check_flags(arguments)
        return session.run(_add(models), session.quiet(settings))
    return session.run(_serve(settings, others), settings, until_stopped=True)


async def _serve(settings: Settings, others: Sequence[Settings]) -> int:
    async with Stack(settings, others=others) as stack:
        if settings.device == device_choice.AUTO:
            _log.info("device_chosen", **device_choice.choose()._asdict())
        address = await stack.ready()
        print(
            " ".join(["ready", address.http, without_logins(address.nats), *(stack.models if others else ())]),
            flush=True,
        )
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


async def _add(models: Sequence[Settings]) -> int:
    """Prints one line for each model once requests for it can be served."""
    for settings in models:
        name = await add_model(settings.port, _with_whole_paths(settings))
        print(f"ready {name}", flush=True)
    return 0


def _check_flags(arguments: argparse.Namespace) -> None:
    """Checks that only the settings of models are given as flags, beside the port by which the stack is found.

    Raises:
        ConfigurationError: another one is given.
    """
    for name in sorted(STACK_WIDE & flags.given_flags(arguments).keys() - {"port", "host", "log-level", "log-format"}):
        raise ConfigurationError(f"--{name} is a setting of the whole stack, which runs already: leave it out")


def _with_whole_paths(settings: Settings) -> Settings:
    """Returns the settings with paths that do not depend on this process's folder."""
    changes = {}
    for field in ("model", "tokenizer", "chat_template"):
        text = getattr(settings, field)
        with suppress(OSError):  # a template may be too long for a name
            if text and Path(text).expanduser().exists():
                changes[field] = _whole_path(text)
    if settings.lora_dirs:
        changes["lora_dirs"] = ",".join(map(_whole_path, names(settings.lora_dirs)))
    if modules := parse(settings.lora_modules):
        changes["lora_modules"] = msgspec.json.encode(list(map(with_whole_path, modules))).decode()
    if (draft := draft_model(settings)) is not None and Path(draft.model).expanduser().exists():
        settings = with_draft_model(settings, _whole_path(draft.model))
    return msgspec.structs.replace(settings, **changes)


def _whole_path(text: str) -> str:
    return str(Path(text).expanduser().absolute())
