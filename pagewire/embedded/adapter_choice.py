"""Divides the adapters that `--lora-modules` names among the models of a stack."""

from collections.abc import Sequence

import msgspec

from pagewire.shared import subjects
from pagewire.shared.adapters.lora_modules import LoraModule, parse
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models import model_folder
from pagewire.shared.settings.config import Settings


def with_own_adapters(models: Sequence[Settings]) -> list[Settings]:
    """Returns the settings of models, each with the adapters that change it; a flag gives all of them to every model.

    Raises:
        ConfigurationError: an adapter is for no served model, or several models would have its name.
    """
    if len(models) == 1:
        return list(models)
    served = [model_folder.served_names(settings) for settings in models]
    owners = {subjects.model_token(name): own[0] for own in served for name in own}
    chosen = []
    for settings, own in zip(models, served, strict=True):
        adapters = [each for each in parse(settings.lora_modules) if _changes(each, own, served)]
        for adapter in adapters:
            owner = owners.setdefault(subjects.model_token(adapter.name), own[0])
            if owner != own[0]:
                raise ConfigurationError(
                    f"adapter {adapter.name} is one of {owner} and of {own[0]}, or one of them has its name: give it "
                    'another name, or say which model it changes: {"name": ..., "path": ..., "base_model_name": ...}'
                )
        text = msgspec.json.encode(adapters).decode() if adapters else ""
        chosen.append(msgspec.structs.replace(settings, lora_modules=text))
    return chosen


def _changes(adapter: LoraModule, own: Sequence[str], served: Sequence[Sequence[str]]) -> bool:
    """Returns whether an adapter may change the model with the names `own`."""
    base = adapter.base_model_name
    if base is not None and not any(base in names for names in served):
        names = ", ".join(name for names in served for name in names)
        raise ConfigurationError(f"adapter {adapter.name} is for {base}, which is not served: choose one of {names}")
    return base is None or base in own
