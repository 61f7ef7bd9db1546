"""The supported architectures and their classes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from pagewire.services.executor.models.config import Common, DtypeSetting, parse, weights_dtype
from pagewire.services.executor.models.decoder import DecoderConfig, DecoderLM
from pagewire.services.executor.models.llama import LlamaConfig
from pagewire.services.executor.models.mistral import MistralConfig
from pagewire.services.executor.models.model import CausalLM
from pagewire.services.executor.models.opt import OPT, OPTConfig
from pagewire.services.executor.models.quantized.formats import find_format, read_quantization
from pagewire.services.executor.models.qwen2 import Qwen2Config
from pagewire.services.executor.models.qwen3 import Qwen3Config
from pagewire.services.executor.models.tensors import open_tensors
from pagewire.services.executor.models.weights import Packing, load_weights
from pagewire.shared.errors import ConfigurationError
from pagewire.shared.gguf.reader import SUFFIX


def _decoder(kind: type[DecoderConfig]) -> Callable[[dict[str, Any]], CausalLM]:
    return lambda config: DecoderLM(parse(kind, config))


FAMILIES: Mapping[str, Callable[[dict[str, Any]], CausalLM]] = {
    "LlamaForCausalLM": _decoder(LlamaConfig),
    "MistralForCausalLM": _decoder(MistralConfig),
    "Qwen2ForCausalLM": _decoder(Qwen2Config),
    "Qwen3ForCausalLM": _decoder(Qwen3Config),
    "OPTForCausalLM": lambda config: OPT(parse(OPTConfig, config)),
}
"""Maps an architecture, as config.json names it, to a function that builds the module of a config.json.

All others are built by `transformers`."""


LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
"""Names of the number of layers in a config.json."""
MAX_LAYERS = 1024
"""Maximum layers: each takes memory before its weights are looked for."""


def build_model(config: dict[str, Any]) -> CausalLM:
    """Returns the module of a config.json of `FAMILIES`, without memory for its weights (on torch's meta device).

    Raises:
        ConfigurationError: the architecture is not supported, or its sizes are impossible.
    """
    common = _common(config)
    build = next((FAMILIES[name] for name in common.architectures if name in FAMILIES), None)
    if build is None:
        names = ", ".join(common.architectures) or "none"
        raise ConfigurationError(f"architecture {names} is not supported, only {', '.join(FAMILIES)}")
    try:
        with torch.device("meta"):
            return build(config)
    except (TypeError, RuntimeError, OverflowError) as error:  # what torch says of sizes that no tensor can have
        raise ConfigurationError("config.json has sizes that no model has: fetch the model again") from error


def is_native(config: dict[str, Any]) -> bool:
    """Returns whether the model of a config.json is one of `FAMILIES`."""
    return any(name in FAMILIES for name in parse(Common, config).architectures)


def load_model(folder: Path, config: dict[str, Any], dtype: DtypeSetting, packing: Packing | None = None) -> CausalLM:
    """Loads the model of `folder`, whose config.json is `config`, into CPU memory, ready for inference.

    With `packing`, which only a model of `FAMILIES` supports, quantized matrices stay so in the layouts of a device.

    Raises:
        ConfigurationError: the architecture is not supported, or the weights do not match the configuration.
    """
    common, quantization = _common(config), read_quantization(folder, config)
    if quantization is not None:
        find_format(quantization)
    if not is_native(config) and folder.suffix != SUFFIX:
        # Imported here, because a family with a file of its own needs no transformers, which take seconds to load.
        from pagewire.services.executor.models.transformers_backend.loading import load_decoder

        return load_decoder(folder, config, weights_dtype(dtype, common), quantization)
    model = build_model(config)
    with open_tensors(folder, quantization) as source:
        load_weights(model, source, weights_dtype(dtype, common), packing)
    return model.eval()


def _common(config: dict[str, Any]) -> Common:
    common = parse(Common, config)
    for name in LAYERS:
        count = config.get(name)
        if isinstance(count, int) and count > MAX_LAYERS:
            raise ConfigurationError(f"config.json has a {name} of more than {MAX_LAYERS}: fetch the model again")
    return common
