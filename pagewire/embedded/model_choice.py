"""Which model a stack serves: decided once, by the process that starts the services."""

import asyncio
import sys
import threading
from pathlib import Path

import msgspec

from pagewire.shared import model_folder
from pagewire.shared.config import Settings
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.named_models import BUNDLED, DEFAULT


async def choose_model(settings: Settings) -> Settings:
    """The settings with the path of the model, and its name in requests. It is fetched where that is needed.

    Where no model is named and the default one cannot be had, the bundled model takes its place, and a line on standard
    error says so.

    Raises:
        ConfigurationError: the model that is named cannot be had, or its configuration cannot be read.
    """
    stop = threading.Event()
    try:
        return await asyncio.to_thread(_choose, settings, stop)
    except asyncio.CancelledError:
        stop.set()
        raise


def _choose(settings: Settings, stop: threading.Event) -> Settings:
    try:
        path = _existing(settings.model or DEFAULT.name, stop)
    except ConfigurationError as error:
        if settings.model or stop.is_set():
            raise
        print(f"serving the bundled model instead of the default one: {error}", file=sys.stderr)
        settings = msgspec.structs.replace(settings, model=BUNDLED)
        path = _existing(BUNDLED, stop)
    return msgspec.structs.replace(settings, model=str(path), served_model_name=model_folder.served_name(settings))


def _existing(model: str, stop: threading.Event) -> Path:
    path = model_folder.resolve(model, stop)
    model_folder.read_config(path)
    return path
