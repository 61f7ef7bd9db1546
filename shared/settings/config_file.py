"""Reads a configuration file in TOML or YAML: settings for all models, and a table of settings for each model."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pagewire.shared.errors import ConfigurationError

YAML_SUFFIXES = frozenset({".yaml", ".yml"})
"""Suffixes of files in YAML; any other file is TOML."""
MODELS = "models"
"""Table with a table of settings for each model, as `[models."org/name"]`."""


class ConfigFile(NamedTuple):
    """The settings in a file, by kebab-case name."""

    shared: dict[str, Any]
    """Settings for all models."""
    models: dict[str, dict[str, Any]]
    """Settings of each model, by the model's name."""


def read(path: Path | None) -> ConfigFile:
    """Returns the settings in a file, none without a file. Names and values are not checked.

    Raises:
        ConfigurationError: the file cannot be read, or has another form.
    """
    fields = _parse(path) if path is not None else {}
    models = fields.pop(MODELS, {})
    if not (isinstance(models, dict) and all(isinstance(table, dict) for table in models.values())):
        raise ConfigurationError(f'{path}: write [{MODELS}."NAME"] and the settings of that model below it')
    return ConfigFile(_with_dashes(fields), {str(model): _with_dashes(table) for model, table in models.items()})


def _parse(path: Path) -> dict[Any, Any]:
    import yaml  # here: few processes have a file to read, and all would import it

    try:
        text = path.read_text()
        fields = (yaml.safe_load(text) or {}) if path.suffix in YAML_SUFFIXES else tomllib.loads(text)
    except OSError as error:
        raise ConfigurationError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        kind = "YAML" if path.suffix in YAML_SUFFIXES else "TOML"
        raise ConfigurationError(f"{path} is not {kind}: {' '.join(str(error).split())}") from error
    if not isinstance(fields, dict):
        raise ConfigurationError(f"{path} has no settings: write one per line, as `max-num-seqs: 8`")
    return fields


def _with_dashes(fields: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns settings as their flags are called: vLLM's files have underscores, too, and lists of several values."""
    values = {str(name).replace("_", "-"): value for name, value in fields.items()}
    return {name: ",".join(map(_text, value)) if isinstance(value, list) else value for name, value in values.items()}


def _text(value: object) -> str:
    """Returns an entry of a list as it is written in a flag: a table as JSON."""
    return msgspec.json.encode(value).decode() if isinstance(value, dict) else str(value)
