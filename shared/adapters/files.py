"""The files of an adapter, and the hash of their content, by which every service knows it."""

from functools import cached_property
from hashlib import sha256
from pathlib import Path

import msgspec

from pagewire.shared.errors import ConfigurationError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
"""Names of weights that are programs, which could do anything when they are read."""
GGUF = ".gguf"
MAX_CONFIG_BYTES = 1 << 20
MAX_WEIGHTS_BYTES = 8 << 30
DIGEST_LENGTH = 32
"""Hexadecimal digits of an adapter's hash."""


class AdapterFiles(msgspec.Struct, frozen=True, dict=True):
    """The content of an adapter: of a PEFT folder, or of a GGUF file."""

    config: bytes
    """adapter_config.json; empty for a GGUF file."""
    weights: bytes
    """adapter_model.safetensors, or the GGUF file."""

    @cached_property
    def digest(self) -> str:
        """The hash of the content, of `DIGEST_LENGTH` hexadecimal digits. Computed once, which blocks for long."""
        sums = sha256(len(self.config).to_bytes(8, "little"))
        sums.update(self.config)
        sums.update(self.weights)
        return sums.hexdigest()[:DIGEST_LENGTH]


def read_files(path: Path) -> AdapterFiles:
    """Reads a PEFT folder or a GGUF file. Blocks, for as long as the files take. Nothing of them is interpreted.

    Raises:
        ConfigurationError: a file is missing, too large or unreadable, or the weights are a pickle.
    """
    if path.suffix == GGUF:
        return AdapterFiles(b"", _read(path, MAX_WEIGHTS_BYTES))
    if not path.is_dir():
        raise ConfigurationError("there is no such folder of an adapter: give one that PEFT has saved, or a .gguf file")
    if not (path / WEIGHTS).exists() and (pickle := next((p for p in PICKLES if (path / p).exists()), None)):
        raise ConfigurationError(f"{pickle} is a pickle, which could run code: save the adapter as {WEIGHTS}")
    return AdapterFiles(_read(path / CONFIG, MAX_CONFIG_BYTES), _read(path / WEIGHTS, MAX_WEIGHTS_BYTES))


def _read(path: Path, most: int) -> bytes:
    try:
        if not path.is_file():
            raise ConfigurationError(f"the adapter has no file {path.name}: give a folder that PEFT has saved")
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise ConfigurationError(f"{path.name} of the adapter cannot be read: {error.strerror}") from error
    if len(data) > most:
        raise ConfigurationError(f"{path.name} of the adapter has more than {most} bytes: save the adapter again")
    return data
