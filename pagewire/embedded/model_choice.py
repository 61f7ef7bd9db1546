"""Chooses the models of a stack, once, in the process that starts the services."""

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pagewire.embedded.adapter_choice import with_own_adapters
from pagewire.shared import subjects
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models import model_folder
from pagewire.shared.models.named_models import BUNDLED
from pagewire.shared.settings.config import Settings
from pagewire.shared.settings.speculation import draft_model, with_draft_model


async def choose_models(models: Sequence[Settings]) -> list[Settings]:
    """Returns the settings of each model, as `choose_model` does.

    Raises:
        ConfigurationError: as in `choose_model`, or two models or their adapters have the same name in requests.
    """
    chosen = [await choose_model(settings) for settings in models]
    check_names(chosen)
    return with_own_adapters(chosen)


def check_names(models: Sequence[Settings]) -> None:
    """Checks that no two models have the same name in requests.

    Raises:
        ConfigurationError: two have.
    """
    names = Counter(subjects.model_token(name) for settings in models for name in model_folder.served_names(settings))
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigurationError(
            f"two models are called {', '.join(twice)}: give each a --served-model-name of its own"
        )


def added_to(models: Sequence[Settings], model: Settings, *, own_broker: bool) -> Settings:
    """Returns the settings of a model that is served beside others, with the adapters that change it.

    Raises:
        ConfigurationError: it or its adapter has the name of another one, or the stack's `own_broker`, which was
            started without adapters, has no room for them.
    """
    check_names([*models, model])
    *_, added = with_own_adapters([*models, model])
    if added.enable_lora and own_broker and not any(each.enable_lora for each in models):
        raise ConfigurationError("the broker of this stack has no room for adapters: start it with --enable-lora")
    return added


async def choose_model(settings: Settings) -> Settings:
    """Returns the settings with the paths of model and tokenizer and the name in requests, and fetches missing files.

    If no model is named and the default model cannot be fetched, the bundled model is used instead, with a message on
    standard error.

    Raises:
        ConfigurationError: the named model cannot be found or fetched, or its configuration cannot be read.
    """
    stop = threading.Event()
    try:
        return await asyncio.to_thread(_choose, settings, stop)
    except asyncio.CancelledError:
        stop.set()
        raise


def _choose(settings: Settings, stop: threading.Event) -> Settings:
    try:
        path = _existing(settings, stop)
    except ConfigurationError as error:
        if settings.model or stop.is_set():
            raise
        print(f"serving the bundled model instead of the default one: {error}", file=sys.stderr)
        settings = msgspec.structs.replace(settings, model=BUNDLED)
        path = _existing(settings, stop)
    names = ",".join(model_folder.served_names(settings))
    tokenizer = str(model_folder.tokenizer_folder(settings, stop)) if settings.tokenizer else ""
    if (draft := draft_model(settings)) is not None:
        settings = with_draft_model(settings, str(_existing(draft, stop)))
    paths = {"model": str(path), "tokenizer": tokenizer, "revision": ""}
    return msgspec.structs.replace(settings, served_model_name=names, **paths)


def _existing(settings: Settings, stop: threading.Event) -> Path:
    path = model_folder.folder_of(settings, stop)
    model_folder.read_config(path)
    return path
