"""The supported architectures and their classes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from pagewire.services.executor.models.config_json import Common, DtypeSetting, parse, weights_dtype
from pagewire.services.executor.models.decoder import DecoderLM
from pagewire.services.executor.models.families.gemma import Gemma2Config, Gemma3Config, GemmaConfig
from pagewire.services.executor.models.families.gpt2 import GPT2Config
from pagewire.services.executor.models.families.gpt_neox import GPTNeoXConfig
from pagewire.services.executor.models.families.llama import LlamaConfig
from pagewire.services.executor.models.families.mistral import MistralConfig, MixtralConfig
from pagewire.services.executor.models.families.olmo import Olmo2Config, Olmo3Config
from pagewire.services.executor.models.families.opt import OPT, OPTConfig
from pagewire.services.executor.models.families.phi3 import Phi3Config
from pagewire.services.executor.models.families.qwen2 import Qwen2Config
from pagewire.services.executor.models.families.qwen3 import Qwen3Config
from pagewire.services.executor.models.families.qwen_moe import OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig
from pagewire.services.executor.models.families.smollm3 import SmolLM3Config
from pagewire.services.executor.models.model import CausalLM
from pagewire.services.executor.models.part import load_part, random_part
from pagewire.services.executor.models.quantized.formats import find_format, read_quantization
from pagewire.services.executor.models.shard import ALONE, Collectives, Shard
from pagewire.services.executor.models.tensors import open_tensors
from pagewire.services.executor.models.weights import Packing, load_weights, places_of, random_weights
from pagewire.shared.errors import ConfigurationError


def _decoder(kind: type[msgspec.Struct]) -> Callable[[dict[str, Any]], CausalLM]:
    def build(config: dict[str, Any]) -> CausalLM:
        described: Any = parse(kind, config)
        try:
            return DecoderLM(described.spec())
        except ValueError as error:
            raise ConfigurationError(f"config.json cannot be used: {error}") from error

    return build


FAMILIES: Mapping[str, Callable[[dict[str, Any]], CausalLM]] = {
    "LlamaForCausalLM": _decoder(LlamaConfig),
    "MistralForCausalLM": _decoder(MistralConfig),
    "MixtralForCausalLM": _decoder(MixtralConfig),
    "Qwen2ForCausalLM": _decoder(Qwen2Config),
    "Qwen2MoeForCausalLM": _decoder(Qwen2MoeConfig),
    "Qwen3ForCausalLM": _decoder(Qwen3Config),
    "Qwen3MoeForCausalLM": _decoder(Qwen3MoeConfig),
    "GemmaForCausalLM": _decoder(GemmaConfig),
    "Gemma2ForCausalLM": _decoder(Gemma2Config),
    "Gemma3ForCausalLM": _decoder(Gemma3Config),
    "Phi3ForCausalLM": _decoder(Phi3Config),
    "SmolLM3ForCausalLM": _decoder(SmolLM3Config),
    "Olmo2ForCausalLM": _decoder(Olmo2Config),
    "Olmo3ForCausalLM": _decoder(Olmo3Config),
    "OlmoeForCausalLM": _decoder(OlmoeConfig),
    "GPT2LMHeadModel": _decoder(GPT2Config),
    "GPTNeoXForCausalLM": _decoder(GPTNeoXConfig),
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


def load_model(
    folder: Path,
    config: dict[str, Any],
    dtype: DtypeSetting,
    packing: Packing | None = None,
    random: int | None = None,
    shard: Shard = ALONE,
    collectives: Collectives | None = None,
) -> CausalLM:
    """Loads the model of `folder`, whose config.json is `config`, into CPU memory, ready for inference.

    With `packing`, which only a model of `FAMILIES` supports, quantized matrices stay so in the layouts of a device.
    With `random`, a seed, the model gets random weights, which are not packed, and those of the folder are not read.
    With `collectives`, it is the part of `shard`, one of several ranks, and reads its own part of the files alone.

    Raises:
        ConfigurationError: the architecture is not supported, or the weights do not match the configuration, or they
            cannot be cut for the ranks.
    """
    common, quantization = _common(config), read_quantization(folder, config)
    if quantization is not None:
        find_format(quantization)
    if not is_native(config):
        # Imported here, because a family with a file of its own needs no transformers, which take seconds to load.
        from pagewire.services.executor.models.transformers_backend.loading import load_decoder

        return load_decoder(folder, config, weights_dtype(dtype, common), quantization, random, shard, collectives)
    model = build_model(config)
    stored = weights_dtype(dtype, common)
    if random is not None:
        if collectives is not None:
            return random_part(model, stored, random, shard, collectives)
        model.load_state_dict(random_weights(model, stored, random), assign=True)
        return model.requires_grad_(requires_grad=False).eval()
    with open_tensors(folder, quantization, dict(places_of(model)).keys()) as source:
        if collectives is not None:
            return load_part(model, source, stored, packing, shard, collectives)
        load_weights(model, source, stored, packing)
    return model.eval()


def _common(config: dict[str, Any]) -> Common:
    common = parse(Common, config)
    for name in LAYERS:
        count = config.get(name)
        if isinstance(count, int) and count > MAX_LAYERS:
            raise ConfigurationError(f"config.json has a {name} of more than {MAX_LAYERS}: fetch the model again")
    return common
