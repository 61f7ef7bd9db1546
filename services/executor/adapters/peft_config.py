"""adapter_config.json, as PEFT writes it: what is supported, and a reason to refuse everything else."""

import math
from collections.abc import Collection
from functools import cached_property
from typing import Annotated, Any

import msgspec

from pagewire.services.executor.adapters.patterns import MAX_SHOWN, Expressions, ModuleNames, PatternValues
from pagewire.shared.errors import ConfigurationError

ALL_LINEAR = "all-linear"
"""`target_modules` that stands for all products but the output layer."""
ALLOWED_INITIALISATIONS = (True, False, None, "true", "false", "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base weights as they are."""
IGNORED_FIELDS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""Fields that change nothing at inference, or that are checked apart. With `fan_in_fan_out` the base weights are stored
as [inputs, outputs], which their own format says already; the factors are stored alike either way."""
REFUSED_FIELDS = {
    "use_dora": "DoRA rescales the base weights",
    "modules_to_save": "whole modules are no low-rank update",
    "lora_bias": "biases of the factors",
    "alora_invocation_tokens": "activated LoRA begins at a token",
    "layer_replication": "replicated layers are another base",
    "use_qalora": "QA-LoRA groups the inputs",
    "use_bdlora": "block-diagonal factors",
    "trainable_token_indices": "tokens of the embedding",
    "target_parameters": "parameters of experts",
    "arrow_config": "routed adapters",
    "ensure_weight_tying": "tied modules to save",
}
"""Fields whose use is refused, and what they stand for."""

Rank = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class PeftConfig(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The fields of adapter_config.json with an effect."""

    peft_type: str
    r: Rank = 8
    lora_alpha: float = 8.0
    target_modules: list[str] | str | None = None
    """Names of modules, or the ends of names; or one expression of whole names."""
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    rank_pattern: dict[str, Rank] = {}
    alpha_pattern: dict[str, float] = {}
    use_rslora: bool = False
    init_lora_weights: bool | str | None = True
    bias: str = "none"
    task_type: str | None = None
    auto_mapping: dict[str, Any] | None = None

    def adapts(self, module: str) -> bool:
        """Returns whether the adapter changes a module of this name, as PEFT decides it."""
        if self.exclude_modules and module in self._excluded:
            return False
        if self.target_modules == ALL_LINEAR or self.target_modules is None:
            return True
        if module not in self._targeted:
            return False
        layers = self.layers_to_transform
        if layers is None or layers == [] or isinstance(self.target_modules, str):
            return True
        return self._layer_of(module) in self._layers

    def rank(self, module: str) -> int:
        """Returns the rank of the update of a module."""
        return self._ranks.value(module, self.r)

    def scale(self, module: str) -> float:
        """Returns the factor of the update of a module."""
        alpha, rank = self._alphas.value(module, self.lora_alpha), self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def _layer_of(self, module: str) -> int | None:
        """Returns the index of the layer in a module's name, behind one of `layers_pattern` if there are any."""
        patterns = self.layers_pattern
        for name in [patterns] if isinstance(patterns, str) else patterns or [r"[^.]*"]:
            layer = self._expressions.number(rf".*\.{name}\.(\d+)\.", module)
            if layer is not None:
                return layer
        return None

    @cached_property
    def _expressions(self) -> Expressions:
        return Expressions()

    @cached_property
    def _targeted(self) -> ModuleNames:
        return ModuleNames(self.target_modules or [], self._expressions)

    @cached_property
    def _excluded(self) -> ModuleNames:
        return ModuleNames(self.exclude_modules or [], self._expressions)

    @cached_property
    def _layers(self) -> frozenset[int]:
        layers = self.layers_to_transform
        return frozenset([layers] if isinstance(layers, int) else layers or [])

    @cached_property
    def _ranks(self) -> PatternValues[int]:
        return PatternValues(self.rank_pattern, self._expressions)

    @cached_property
    def _alphas(self) -> PatternValues[float]:
        return PatternValues(self.alpha_pattern, self._expressions)


def read_config(data: bytes, architectures: Collection[str]) -> PeftConfig:
    """Returns the configuration of an adapter for a model with these class names of `transformers`.

    Raises:
        ConfigurationError: it is malformed, for another model, or needs what is not supported; the message names it.
    """
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any])
        config = msgspec.convert(fields, PeftConfig)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"adapter_config.json cannot be used: {error}") from error
    if config.peft_type != "LORA":
        raise ConfigurationError(f"adapter_config.json has peft_type {config.peft_type}: only LORA is supported")
    for name, meaning in REFUSED_FIELDS.items():
        if fields.get(name):
            raise ConfigurationError(f"adapter_config.json has {name} ({meaning}), which is not supported")
    if config.init_lora_weights not in ALLOWED_INITIALISATIONS:
        raise ConfigurationError(
            f"adapter_config.json has init_lora_weights {config.init_lora_weights}, which changes the base weights: "
            "save the adapter with path_initial_model_for_weight_conversion"
        )
    if config.bias != "none":
        raise ConfigurationError(f"adapter_config.json has bias {config.bias}: only none is supported")
    if config.task_type not in (None, "CAUSAL_LM"):
        raise ConfigurationError(f"adapter_config.json has task_type {config.task_type}: only CAUSAL_LM is supported")
    base = (config.auto_mapping or {}).get("base_model_class")
    if base is not None and base not in architectures:
        raise ConfigurationError(f"the adapter is for a {base}, and the model is a {', '.join(architectures)}")
    known = IGNORED_FIELDS | REFUSED_FIELDS.keys() | set(PeftConfig.__struct_fields__)
    if unknown := sorted(name for name, value in fields.items() if value and name not in known):
        raise ConfigurationError(f"adapter_config.json has a field {unknown[0][:MAX_SHOWN]}, which is not known here")
    if not all(math.isfinite(alpha) for alpha in (config.lora_alpha, *config.alpha_pattern.values())):
        raise ConfigurationError("adapter_config.json has a lora_alpha that is not finite")
    return config
