"""adapter_config.json, as PEFT writes it: what is supported, and a reason to refuse everything else."""

import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
import regex

from pagewire.shared.errors import ConfigurationError

N = TypeVar("N", int, float)
PATTERN_SECONDS = 0.1
"""Seconds that a search for a pattern may take. Patterns come from outside, and some take years."""
MAX_PATTERN = 10_000
"""Characters of a pattern."""
MAX_REPEATS = 100_000
"""Product of the counts, such as `{3}`, in a pattern. The library writes out what they repeat, which no time limits."""
ALL_LINEAR = "all-linear"
"""`target_modules` that stands for all products but the output layer."""
MAX_SHOWN = 100
"""Characters that an error shows of a pattern, and of a name."""
_COUNT = regex.compile(r"\{(?:\d*,)?(\d+)(?:,)?\}")
"""The highest count of a repetition."""
KEPT = (True, False, None, "true", "false", "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base weights as they are."""
INFORMATION = frozenset(
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
CHANGES = {
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


class PeftConfig(msgspec.Struct, frozen=True, kw_only=True):
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
        if self.exclude_modules and _names(self.exclude_modules, module):
            return False
        if self.target_modules == ALL_LINEAR or self.target_modules is None:
            return True
        if not _names(self.target_modules, module):
            return False
        layers = self.layers_to_transform
        if layers is None or layers == [] or isinstance(self.target_modules, str):
            return True
        return _layer_of(module, self.layers_pattern) in ([layers] if isinstance(layers, int) else layers)

    def rank(self, module: str) -> int:
        """Returns the rank of the update of a module."""
        return _of_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """Returns the factor of the update of a module."""
        alpha, rank = _of_pattern(self.alpha_pattern, module, self.lora_alpha), self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


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
    for name, meaning in CHANGES.items():
        if fields.get(name):
            raise ConfigurationError(f"adapter_config.json has {name} ({meaning}), which is not supported")
    if config.init_lora_weights not in KEPT:
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
    known = INFORMATION | CHANGES.keys() | set(PeftConfig.__struct_fields__)
    if unknown := sorted(name for name, value in fields.items() if value and name not in known):
        raise ConfigurationError(f"adapter_config.json has a field {unknown[0][:MAX_SHOWN]}, which is not known here")
    if not all(math.isfinite(alpha) for alpha in (config.lora_alpha, *config.alpha_pattern.values())):
        raise ConfigurationError("adapter_config.json has a lora_alpha that is not finite")
    return config


def _names(targets: list[str] | str, module: str) -> bool:
    """Returns whether `targets` name a module: an expression all of its name, an item of a list the end of it."""
    if isinstance(targets, str):
        return _matches(targets, module)
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _layer_of(module: str, patterns: list[str] | str | None) -> int | None:
    """Returns the index of the layer in a module's name, behind one of `patterns` if there are any."""
    names = [patterns] if isinstance(patterns, str) else patterns or [r"[^.]*"]
    for name in names:
        layer = _searched(rf".*\.{name}\.(\d+)\.", module)
        if layer is not None:
            return layer
    return None


def _of_pattern(values: Mapping[str, N], module: str, default: N) -> N:
    """Returns the value of the first key that is an expression of the end of a module's name."""
    return next((value for key, value in values.items() if _matches(rf"(.*\.)?({key})", module)), default)


def _matches(expression: str, text: str) -> bool:
    """Returns whether an expression matches all of a text."""
    return _search(regex.fullmatch, expression, text) is not None


def _searched(expression: str, text: str) -> int | None:
    """Returns the number that the last group of an expression finds at the beginning of a text."""
    match = _search(regex.match, expression, text)
    number = None if match is None else match[match.re.groups]
    return None if number is None else int(number)


def _search(search: Any, expression: str, text: str) -> Any:
    shown = f"adapter_config.json has {expression[:MAX_SHOWN]!r}"
    counts = (max(float(count), 1.0) for count in _COUNT.findall(expression[:MAX_PATTERN]))
    if len(expression) > MAX_PATTERN or math.prod(counts) > MAX_REPEATS:
        raise ConfigurationError(f"{shown}, which is too large for an expression: simplify it")
    try:
        return search(expression, text, timeout=PATTERN_SECONDS)
    except regex.error as error:
        raise ConfigurationError(f"{shown}, which is no expression: {error}") from error
    except RecursionError as error:
        raise ConfigurationError(f"{shown}, which is nested too deeply: simplify it") from error
    except TimeoutError as error:
        raise ConfigurationError(f"{shown}, which takes too long to match") from error
