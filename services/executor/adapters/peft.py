"""Reads adapters that PEFT has saved."""

from collections.abc import Mapping
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from pagewire.kernels.low_rank import LowRank
from pagewire.services.executor.adapters.adapter import Adapter
from pagewire.services.executor.adapters.pairs import check_pair, factors, target_of, update_of
from pagewire.services.executor.adapters.peft_config import PeftConfig, read_config
from pagewire.services.executor.adapters.targets import Targets
from pagewire.shared.adapters.files import AdapterFiles
from pagewire.shared.errors import ConfigurationError

PREFIX = "base_model.model."
"""Beginning of the names of tensors, before the name of a module."""
SHRINK, EXPAND = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of both factors."""
MAX_HEADER_BYTES = 8 << 20
"""Bytes of a file's table of tensors beyond which it is refused."""


def read_peft(files: AdapterFiles, targets: Targets, max_rank: int) -> Adapter:
    """Returns the adapter of a folder, all of which has been checked.

    Raises:
        ConfigurationError: the adapter is broken, does not fit the model, or needs what is not supported.
    """
    config = read_config(files.config, targets.architectures)
    tensors = dict(sorted(_tensors(files.weights).items()))  # stored in any order, on which sums must not depend
    pairs = factors(tensors, PREFIX, SHRINK, EXPAND, "save it again")
    updates: dict[str, list[LowRank]] = {}
    for module, (shrink, expand) in pairs.items():
        target = target_of(module, targets)
        if not config.adapts(module):
            raise ConfigurationError(f"the adapter has tensors of {module}, which its target_modules do not name")
        check_pair(module, shrink, expand, target, config.rank(module), max_rank)
        updates.setdefault(target.path, []).append(update_of(shrink, expand, target, config.scale(module)))
    _check_complete(config, targets, pairs)
    return Adapter(updates)


def _tensors(data: bytes) -> Mapping[str, Tensor]:
    header = int.from_bytes(data[:8], "little")
    if len(data) < 8 or header > min(MAX_HEADER_BYTES, len(data) - 8):
        raise ConfigurationError(f"adapter_model.safetensors has a header of {header} bytes: save the adapter again")
    try:
        tensors: Mapping[str, Tensor] = safetensors.torch.load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise ConfigurationError(f"adapter_model.safetensors is broken ({error}): save the adapter again") from error
    return tensors


def _check_complete(config: PeftConfig, targets: Targets, pairs: Mapping[str, Any]) -> None:
    """Checks that every module that the configuration names has its factors."""
    if config.target_modules is None:
        return
    for module in targets.products.keys() - pairs.keys():
        if config.adapts(module):
            raise ConfigurationError(f"the adapter has no tensors of {module}, which its target_modules name")
