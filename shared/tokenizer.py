"""Loads the tokenizer of a model folder."""

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from pagewire.shared.errors import ConfigurationError


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Returns the fast tokenizer in a model folder, chat template included. Does not import torch.

    Truncation and padding are off, so that several threads may use its `backend_tokenizer` at once.

    Raises:
        ConfigurationError: tokenizer.json is missing, or it or a file beside it is broken.
    """
    if not (path / "tokenizer.json").is_file():
        raise ConfigurationError(
            f"{path} has no tokenizer.json: give a model folder with one, or make it with transformers' save_pretrained"
        )
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    except Exception as error:  # the Rust parser raises bare Exceptions for files that it cannot read
        raise ConfigurationError(f"the tokenizer in {path} is broken ({error}): fetch the model again") from error
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer
