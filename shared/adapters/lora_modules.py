"""The adapters that `--lora-modules` names."""

import json
import re
from pathlib import Path

import msgspec

from pagewire.shared import subjects
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models import model_folder
from pagewire.shared.settings.config import Settings

MAX_NAME = 128
_NAME = re.compile(r"[\w./:@-]+", re.ASCII)


class LoraModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter by its name in requests. The fields are vLLM's."""

    name: str
    path: str
    """Folder that PEFT has saved, or .gguf file."""
    base_model_name: str | None = None
    """Name of the model that it changes; None: the served one."""


def lora_modules(settings: Settings) -> list[LoraModule]:
    """Returns the adapters of the settings, with absolute paths.

    >>> lora_modules(Settings(model="m", lora_modules="sql=/adapters/sql"))
    [LoraModule(name='sql', path='/adapters/sql', base_model_name=None)]

    Raises:
        ConfigurationError: the setting is malformed, or two names are alike.
    """
    if not settings.lora_modules:
        return []
    modules = [with_whole_path(module) for module in parse(settings.lora_modules)]
    own = model_folder.served_names(settings)
    names = list(own)
    for module in modules:
        check_name(module.name, names)
        if module.base_model_name not in (None, *own):
            raise ConfigurationError(
                f"adapter {module.name} is for {module.base_model_name}, and {own[0]} is served: leave one of them out"
            )
        names.append(module.name)
    return modules


def check_name(name: str, others: list[str]) -> None:
    """Checks the name of an adapter, which must be another than those of models and adapters beside it, `others`.

    Raises:
        ConfigurationError: the name cannot be used.
    """
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise ConfigurationError(f"{name[:MAX_NAME]!r} is no name of an adapter: use letters, digits and -_./:@")
    clash = next((other for other in others if subjects.model_token(other) == subjects.model_token(name)), None)
    if clash is not None:
        raise ConfigurationError(f"adapter {name} and {clash} have one subject: choose another name")


def parse(text: str) -> list[LoraModule]:
    """Returns the adapters of a text: `name=path` pairs and objects in JSON, separated by commas, or a JSON list.

    Raises:
        ConfigurationError: the text is malformed.
    """
    modules: list[LoraModule] = []
    rest = text.strip()
    try:
        if rest.startswith("["):
            return msgspec.convert(json.loads(rest), list[LoraModule])
        while rest:
            if rest.startswith("{"):
                fields, end = json.JSONDecoder().raw_decode(rest)
                modules.append(msgspec.convert(fields, LoraModule))
                rest = rest[end:].lstrip(", ")
                continue
            item, _, rest = rest.partition(",")
            name, _, path = item.strip().partition("=")
            if not name or not path:
                raise ConfigurationError(f"lora-modules has {item!r}: write name=path, or an object in JSON")
            modules.append(LoraModule(name, path))
            rest = rest.lstrip(", ")
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise ConfigurationError(f"lora-modules is no list of adapters in JSON: {error}") from error
    return modules


def with_whole_path(module: LoraModule) -> LoraModule:
    """Returns an adapter with a path that does not depend on this process's folder."""
    return msgspec.structs.replace(module, path=str(Path(module.path).expanduser().absolute()))
