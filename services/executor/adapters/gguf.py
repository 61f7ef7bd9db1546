"""Reads adapters that llama.cpp's converter has written."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map
from torch import Tensor

from pagewire.kernels.low_rank import LowRank
from pagewire.services.executor.adapters.adapter import Adapter
from pagewire.services.executor.adapters.pairs import check_pair, factors, target_of, update_of
from pagewire.services.executor.adapters.targets import Targets
from pagewire.services.executor.models.gguf.names import rotary_pairs
from pagewire.services.executor.models.gguf.tensors import dequantize
from pagewire.shared.adapters.files import AdapterFiles
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.models.gguf.architectures import ARCHITECTURES
from pagewire.shared.models.gguf.reader import SUFFIX, GgufModel

SHRINK, EXPAND = ".lora_a", ".lora_b"
"""Ends of the names of both factors."""
SUPPORTED = ("llama", "qwen2", "qwen3")
"""Architectures whose matrices llama.cpp's converter leaves as they are, but for the order of the rotation."""


def read_gguf(files: AdapterFiles, targets: Targets, max_rank: int) -> Adapter:
    """Returns the adapter of a GGUF file, all of which has been checked.

    Raises:
        ConfigurationError: the adapter is broken, does not fit the model, or needs what is not supported.
    """
    with tempfile.NamedTemporaryFile(suffix=SUFFIX) as file:
        file.write(files.weights)
        file.flush()
        try:
            model = GgufModel.open(Path(file.name))
            tensors = _tensors(model, files.weights)
        except ConfigurationError as error:  # the name of the temporary file says nothing
            raise ConfigurationError(str(error).replace(file.name, "the adapter")) from error
    architecture = _check_kind(model, targets)
    alpha = model.metadata.get("adapter.lora.alpha", 0.0)
    if type(alpha) not in {int, float} or not np.isfinite(alpha):
        raise ConfigurationError("the adapter has an adapter.lora.alpha that is no number: convert it again")
    updates: dict[str, list[LowRank]] = {}
    modules = _modules(architecture, targets)
    for base, (shrink, expand) in factors(tensors, "", SHRINK, EXPAND, "convert it again").items():
        module = modules.get(base, base)
        target, rank = target_of(module, targets), len(shrink)
        check_pair(module, shrink, expand, target, rank, max_rank)
        turned = ARCHITECTURES[architecture].interleaved and base.endswith((".attn_q.weight", ".attn_k.weight"))
        rows = expand[rotary_pairs(len(expand), targets.head_size).argsort()] if turned else expand
        updates.setdefault(target.path, []).append(update_of(shrink, rows, target, alpha / rank if alpha else 1.0))
    return Adapter(updates)


def _check_kind(model: GgufModel, targets: Targets) -> str:
    """Returns the architecture of the file, which is an adapter of the model."""
    for key, value in (("general.type", "adapter"), ("adapter.type", "lora")):
        if model.metadata.get(key) != value:
            raise ConfigurationError(f"the file has {key} {model.metadata.get(key)}: only {value} is supported")
    architecture = str(model.metadata.get("general.architecture"))
    fitting = {name for name in SUPPORTED if ARCHITECTURES[name].name in targets.architectures}
    if "MistralForCausalLM" in targets.architectures:
        fitting.add("llama")
    if architecture not in fitting:
        raise ConfigurationError(f"the adapter is for {architecture}, and the model is a {targets.architectures[0]}")
    return architecture


def _modules(architecture: str, targets: Targets) -> Mapping[str, str]:
    """Returns the modules of the model by the names that llama.cpp's converter gives their weights."""
    number = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(MODEL_ARCH(number), targets.layers)
    weights = {f"{module}.weight": module for module in (*targets.products, *targets.others)}
    return {names.get_name(weight, (".weight",)) or weight: module for weight, module in weights.items()}


def _tensors(model: GgufModel, data: bytes) -> Mapping[str, Tensor]:
    """Returns the tensors of a file with this content."""
    tensors = {}
    for name, stored in model.tensors.items():
        size = stored.rows * stored.row_bytes
        blocks = np.frombuffer(data, np.uint8, size, stored.offset).reshape(stored.rows, -1).copy()
        tensors[name] = dequantize(blocks, stored.type).view(stored.shape)
    return tensors
