"""Reads the tokenizer of a model folder or of a GGUF file, like `transformers`, whose import would take longer."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.gguf import tokenizer as gguf_tokenizer
from pagewire.shared.models.gguf.reader import SUFFIX, GgufModel
from pagewire.shared.models.model_tokenizer import NAMED, ModelTokenizer

_PREFIXING = ("GPT2Tokenizer", "GPT2TokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast")
"""Classes of transformers that follow `add_prefix_space` of tokenizer_config.json, whatever tokenizer.json says."""


def load_tokenizer(path: Path) -> ModelTokenizer:
    """Returns the tokenizer of a model folder or of a GGUF file, with chat templates.

    Raises:
        ConfigurationError: a file is missing or malformed, or the GGUF file has no tokenizer.
    """
    if path.suffix == SUFFIX:
        return gguf_tokenizer.load_tokenizer(GgufModel.open(path))
    if not (path / "tokenizer.json").is_file():
        raise ConfigurationError(
            f"{path} has no tokenizer.json: give a model folder with one, or make it with transformers' save_pretrained"
        )
    try:
        return _from_folder(path)
    except Exception as error:  # the Rust parser raises bare Exceptions for files that it cannot read
        raise ConfigurationError(f"the tokenizer in {path} is broken ({error}): fetch the model again") from error


def _from_folder(path: Path) -> ModelTokenizer:
    backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    config = _read(path / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # as older versions of transformers write it
        config |= _read(path / "special_tokens_map.json")
    own = [name for name, value in config.items() if name.endswith("_token") and isinstance(value, str)]
    texts = {name: config[name] for name in dict.fromkeys([*NAMED, *own]) if config.get(name) is not None}
    extra, others = config.get("extra_special_tokens"), config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        texts |= extra
    else:
        others = extra or others
    named = {name: _token(text, special=True) for name, text in texts.items()}
    names = {token.content for token in named.values()}
    listed = config.get("added_tokens_decoder", {})
    for id_ in sorted(listed, key=int):
        backend.add_tokens([_token(listed[id_], special=listed[id_]["content"] in names)])
    prefix = config.get("add_prefix_space")
    if config.get("tokenizer_class") in _PREFIXING and isinstance(prefix, bool):
        _set_prefix(backend, prefix)
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    template = _template(path, config)
    return ModelTokenizer.of(backend, template, named, [_token(text, special=True) for text in others])


def _set_prefix(backend: Tokenizer, prefix: bool) -> None:
    """Sets whether a byte-level tokenizer puts a space before each word that begins with none."""
    cut: Any = backend.pre_tokenizer
    steps: Any = cut if isinstance(cut, pre_tokenizers.Sequence) else [cut]
    for step in steps:
        if isinstance(step, pre_tokenizers.ByteLevel):
            step.add_prefix_space = prefix


def _template(path: Path, config: dict[str, Any]) -> object:
    """Returns the chat templates in files of their own, or else those in tokenizer_config.json."""
    files = {file.stem: file for file in (path / "additional_chat_templates").glob("*.jinja")}
    if (path / "chat_template.jinja").is_file():
        files["default"] = path / "chat_template.jinja"
    named = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    return named or config.get("chat_template")


def _token(value: str | dict[str, Any], *, special: bool) -> AddedToken:
    """Returns a token that a file gives as a text or with its properties; `special` makes it special in either case."""
    properties = {"content": value} if isinstance(value, str) else {k: v for k, v in value.items() if k != "__type"}
    return AddedToken(**properties | ({"special": True} if special else {}))


def _read(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if there is no file."""
    if not file.is_file():
        return {}
    fields = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(fields, dict):
        raise TypeError(f"{file.name} holds no object")
    return fields
