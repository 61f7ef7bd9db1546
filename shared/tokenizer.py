"""Reads the tokenizer of a model folder or of a GGUF file."""

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.gguf import tokenizer as gguf_tokenizer
from pagewire.shared.gguf.reader import SUFFIX, GgufModel


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Returns the fast tokenizer of a model folder or of a GGUF file, with chat template. Does not import torch.

    Truncation and padding are off, so that several threads can use its `backend_tokenizer` at once.

    Raises:
        ConfigurationError: a file is missing or malformed, or the GGUF file has no tokenizer.
    """
    tokenizer = gguf_tokenizer.load_tokenizer(GgufModel.open(path)) if path.suffix == SUFFIX else _from_folder(path)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def _from_folder(path: Path) -> PreTrainedTokenizerFast:
    if not (path / "tokenizer.json").is_file():
        raise ConfigurationError(
            f"{path} has no tokenizer.json: give a model folder with one, or make it with transformers' save_pretrained"
        )
    try:
        return PreTrainedTokenizerFast.from_pretrained(path)
    except Exception as error:  # the Rust parser raises bare Exceptions for files that it cannot read
        raise ConfigurationError(f"the tokenizer in {path} is broken ({error}): fetch the model again") from error
