"""Finds a model, which is a folder in Hugging Face format or a GGUF file, and reads its configuration."""

import hashlib
import json
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from pagewire.shared import subjects
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.config_form import TRAINED_LENGTH, in_one_form
from pagewire.shared.models.fetch import fetch
from pagewire.shared.models.gguf import config as gguf_config
from pagewire.shared.models.gguf.ends import eos_ids as eos_of_gguf
from pagewire.shared.models.gguf.reader import SUFFIX, GgufModel, model_name
from pagewire.shared.models.hub_download import COPIES, WEIGHTS, download
from pagewire.shared.models.named_models import BUNDLED as BUNDLED_NAME
from pagewire.shared.models.named_models import DEFAULT, NAMED_MODELS
from pagewire.shared.models.text_config import text_part
from pagewire.shared.settings.config import Settings

BUNDLED = Path(__file__).parents[2] / "bundled"
"""Folder of the small model that is part of the package."""

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
SINGLE = "model.safetensors"
"""File with the weights of a model."""
INDEX = "model.safetensors.index.json"
"""File that names the files of a model's weights, if they are several."""
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


def folder_of(settings: Settings, stop: threading.Event | None = None) -> Path:
    """Returns the folder or GGUF file of the model, as `resolve` finds it."""
    return resolve(settings.model, settings.revision, weights=settings.load_format != "dummy", stop=stop)


def tokenizer_folder(settings: Settings, stop: threading.Event | None = None) -> Path:
    """Returns the folder or GGUF file of the tokenizer, which is the model's unless it is set."""
    return resolve(settings.tokenizer, weights=False, stop=stop) if settings.tokenizer else folder_of(settings, stop)


def resolve(model: str, revision: str = "", *, weights: bool = True, stop: threading.Event | None = None) -> Path:
    """Returns the folder or GGUF file of `model`: a path, a short name, a hub id, or "" for the default model.

    A model that is not in the cache is downloaded.

    Args:
        model: name of the model. A folder of that name takes precedence over a short name or a hub id.
        revision: branch, tag or commit of a hub id; "": the newest.
        weights: whether a download includes the weights.
        stop: stops the download when it is set.

    Raises:
        ConfigurationError: there is no such folder, file or model, or the model cannot be fetched; or there is a
            revision without a hub id.
    """
    model = model or DEFAULT.name
    if revision and (
        _expanded(model).exists() or model in NAMED_MODELS or model == BUNDLED_NAME or model.endswith(SUFFIX)
    ):
        raise ConfigurationError(f"only a hub id has revisions, and {model} is none: leave revision out")
    folder = _expanded(model)
    if folder.is_dir():
        return folder.resolve()
    if folder.suffix == SUFFIX:
        if not folder.is_file():
            raise ConfigurationError(f"there is no file {model}: give an existing one")
        return folder.absolute()  # links are not resolved: the other parts of a split model are in the link's folder
    if model == BUNDLED_NAME:
        return BUNDLED
    if model in NAMED_MODELS:
        return fetch(NAMED_MODELS[model], stop)
    if not _HUB_ID.fullmatch(model):
        raise ConfigurationError(f"there is no folder {model}: give an existing one, or a hub id such as org/name")
    return download(model, revision, weights=weights, stop=stop)


def _expanded(text: str) -> Path:
    """Returns a path with the home folder in place of `~`, or as it is if there is no such user."""
    path = Path(text)
    with suppress(RuntimeError):
        path = path.expanduser()
    return path


def served_token(settings: Settings) -> str:
    """Returns the model's own name as a token of subjects. Reads nothing."""
    return subjects.model_token(served_name(settings))


def served_names(settings: Settings) -> list[str]:
    """Returns the model's names in requests, of which the first is its own and the others are aliases."""
    names = [name.strip() for name in settings.served_model_name.split(",")]
    return list(dict.fromkeys(filter(None, names))) or [_own_name(settings)]


def served_name(settings: Settings) -> str:
    """Returns the model's name in requests: the setting, else the folder's or file's name, short name or hub id."""
    return served_names(settings)[0]


def _own_name(settings: Settings) -> str:
    if not settings.model:
        return DEFAULT.name
    folder = _expanded(settings.model)
    if folder.suffix == SUFFIX:
        return model_name(folder)
    return folder.resolve().name if folder.is_dir() else settings.model


def read_config(path: Path) -> dict[str, Any]:
    """Returns the model's config.json, or that of a GGUF file; if the model also takes images, its decoder's.

    Raises:
        ConfigurationError: the file is missing or malformed.
    """
    if path.suffix == SUFFIX:
        return gguf_config.read_config(GgufModel.open(path))
    return in_one_form(text_part(in_one_form(_read_object(path / "config.json"))))


def read_generation_config(path: Path) -> dict[str, Any]:
    """Returns the model's generation_config.json, the sampling of a GGUF file, or the configuration of a named model.

    Empty without any of these.

    Raises:
        ConfigurationError: the file is malformed.
    """
    if path.suffix == SUFFIX:
        named = next((dict(model.generation_config) for model in NAMED_MODELS.values() if model.path == path), {})
        return (gguf_config.sampling(GgufModel.open(path)) if path.is_file() else {}) | named
    file = path / "generation_config.json"
    return _read_object(file) if file.exists() else {}


def eos_ids(path: Path) -> frozenset[int]:
    """Returns the tokens that end a text, from config.json and generation_config.json, or from a GGUF file's metadata.

    Tokens beyond the vocabulary, which publishers add without new rows of the embedding, are left out.

    Raises:
        ConfigurationError: a file is malformed, or an entry is not a token id.
    """
    if path.suffix == SUFFIX:
        return eos_of_gguf(GgufModel.open(path))
    tokens: set[int] = set()
    config = read_config(path) if (path / "config.json").exists() else {}
    for name, fields in (("config.json", config), ("generation_config.json", read_generation_config(path))):
        value = fields.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise ConfigurationError(f"{path / name} has an eos_token_id that is neither a token id nor a list of them")
        tokens.update(ids)
    tokens |= _eos_of_tokenizer(path)
    vocab_size = config.get("vocab_size")
    return frozenset(token for token in tokens if not isinstance(vocab_size, int) or token < vocab_size)


def _eos_of_tokenizer(path: Path) -> set[int]:
    """Returns the id of the eos token of tokenizer_config.json, which publishers change there alone."""
    file = path / "tokenizer_config.json"
    settings = _read_object(file) if file.exists() else {}
    eos = settings.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    listed = settings.get("added_tokens_decoder")
    if isinstance(listed, dict):
        ids = [id_ for id_, token in listed.items() if isinstance(token, dict) and token.get("content") == text]
    else:
        file = path / "tokenizer.json"
        added = _read_object(file).get("added_tokens") if text and file.exists() else []
        tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
        ids = [str(token.get("id")) for token in tokens if token.get("content") == text]
    return {int(id_) for id_ in ids if id_.isdecimal()}


def max_model_len(settings: Settings, config: dict[str, Any]) -> int:
    """Returns the context length in tokens: the setting, by default the model's own length.

    Raises:
        ConfigurationError: the setting exceeds the model's length, or neither gives a length.
    """
    own = _own_context(config)
    length = settings.max_model_len
    if length is not None and length < 1:
        raise ConfigurationError(f"max-model-len is {length}: it must be at least 1")
    if length is None:
        if own is None:
            raise ConfigurationError("config.json has no max_position_embeddings: set max-model-len")
        return own
    if own is not None and length > own:
        raise ConfigurationError(f"max-model-len {length} exceeds the model's context of {own}: set at most {own}")
    return length


def _own_context(config: dict[str, Any]) -> int | None:
    """Returns the model's context length; None if config.json has none.

    Qwen2.5's model card adds YaRN in `rope_scaling` without raising max_position_embeddings: the context is then the
    trained one times the factor.
    """
    own: int | None = next((config[key] for key in _CONTEXT_KEYS if isinstance(config.get(key), int)), None)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if own is None or not isinstance(rope, dict) or "yarn" not in (rope.get("rope_type"), rope.get("type")):
        return own
    original, factor = rope.get(TRAINED_LENGTH) or own, rope.get("factor") or 1.0
    if not isinstance(original, int) or not isinstance(factor, int | float):
        return own
    return max(own, int(original * factor))


def revision(path: Path) -> str:
    """Returns a fingerprint of the configuration and of the weight files' names and sizes, 12 hexadecimal digits.

    Raises:
        ConfigurationError: the configuration is missing.
    """
    digest = hashlib.sha256(json.dumps(read_config(path), sort_keys=True).encode())
    for file in weight_files(path):
        digest.update(f"\n{file.name} {file.stat().st_size}".encode())
    return digest.hexdigest()[:12]


def weight_files(path: Path) -> list[Path]:
    """Returns the files with the weights of a folder or of a GGUF model, as far as a folder has them.

    Other files of a folder, such as copies in another format, are not read.

    Raises:
        ConfigurationError: a part of a GGUF model is missing or broken, or a folder's index is.
    """
    if path.suffix == SUFFIX:
        return list(GgufModel.open(path).files)
    files = sorted(path.glob(WEIGHTS))
    if (index := path / INDEX).exists():
        named = _read_object(index).get("weight_map")
        names = set(map(str, named.values())) if isinstance(named, dict) else set()
        return [file for file in files if file.name in names]
    if (single := path / SINGLE) in files:
        return [single]
    return [file for file in files if not file.match(COPIES[0])]


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{file.parent} has no {file.name}: give a model folder in Hugging Face format"
        ) from error
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{file} is not JSON ({error}): fetch the model again") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{file} does not hold a JSON object: fetch the model again")
    return value
