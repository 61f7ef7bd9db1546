"""Reads an adapter of any format."""

from pagewire.services.executor.adapters.adapter import Adapter
from pagewire.services.executor.adapters.gguf import read_gguf
from pagewire.services.executor.adapters.peft import read_peft
from pagewire.services.executor.adapters.targets import Targets
from pagewire.shared.adapters.files import AdapterFiles


def read_adapter(files: AdapterFiles, targets: Targets, max_rank: int) -> Adapter:
    """Returns the adapter of its files, all of which has been checked against a model.

    Raises:
        ConfigurationError: the adapter is broken, does not fit the model, or needs what is not supported.
    """
    read = read_peft if files.config else read_gguf
    return read(files, targets, max_rank)
