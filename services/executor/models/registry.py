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
from pagewire.services.executor.models.qwen2 import Qwen2Config
from pagewire.services.executor.models.qwen3 import Qwen3Config
from pagewire.services.executor.models.weights import load_weights
from pagewire.shared.errors import ConfigurationError


def _decoder(kind: type[DecoderConfig]) -> Callable[[dict[str, Any]], CausalLM]:
    return lambda config: DecoderLM(parse(kind, config))


FAMILIES: Mapping[str, Callable[[dict[str, Any]], CausalLM]] = {
    "LlamaForCausalLM": _decoder(LlamaConfig),
    "MistralForCausalLM": _decoder(MistralConfig),
    "Qwen2ForCausalLM": _decoder(Qwen2Config),
    "Qwen3ForCausalLM": _decoder(Qwen3Config),
    "OPTForCausalLM": lambda config: OPT(parse(OPTConfig, config)),
}
"""Maps an architecture, as config.json names it, to a function that builds the module of a config.json."""


def build_model(config: dict[str, Any]) -> CausalLM:
    """Returns the module that a config.json describes, without memory for its weights (on torch's meta device).

    Raises:
        ConfigurationError: the architecture is not supported.
    """
    common = parse(Common, config)
    if common.quantization_config is not None:
        raise ConfigurationError("quantized weights are not supported: use the unquantized model")
    build = next((FAMILIES[name] for name in common.architectures if name in FAMILIES), None)
    if build is None:
        names = ", ".join(common.architectures) or "none"
        raise ConfigurationError(f"architecture {names} is not supported, only {', '.join(FAMILIES)}")
    with torch.device("meta"):
        return build(config)


def load_model(folder: Path, config: dict[str, Any], dtype: DtypeSetting) -> CausalLM:
    """Loads the model of `folder`, whose config.json is `config`, into CPU memory, ready for inference.

    Raises:
        ConfigurationError: the architecture is not supported, or the weights do not match the configuration.
    """
    model = build_model(config)
    load_weights(model, folder, weights_dtype(dtype, parse(Common, config)))
    return model.eval()
