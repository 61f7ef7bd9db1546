"""How tokens are drafted: the settings `spec-type` and `speculative-config`, with vLLM's keys."""

from typing import Annotated, Literal

import msgspec

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.settings.config import Positive, Settings
from pagewire.shared.settings.spelling import did_you_mean

METHODS = ("ngram", "suffix", "draft_model")
"""Methods that draft."""
PLANNED = ("eagle3", "mtp")
"""Methods that are refused by name: they need heads that are trained for the model."""
NGRAM_TOKENS = 8
"""Tokens of a draft of method ngram, at most, where none are set."""
SUFFIX_TOKENS = 16
"""Tokens of a draft of method suffix, at most, where none are set."""
MODEL_TOKENS = 8
"""Tokens of a draft of a draft model, at most, where none are set."""
_TOKENS = {"ngram": NGRAM_TOKENS, "suffix": SUFFIX_TOKENS, "draft_model": MODEL_TOKENS}
NGRAM_LENGTH = 5
"""Tokens that method ngram compares where neither bound is set, as in vLLM."""
MAX_TOKENS = 64
"""Tokens of a draft that can be set at most."""
_KEYS = {
    "draft_model": ("model", "quantization", "max_model_len", "draft_tensor_parallel_size"),
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "suffix": (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
        "suffix_decoding_max_cached_requests",
    ),
}
"""Keys that only one method has."""


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The keys of `speculative-config`."""

    method: str = ""
    """ngram, suffix, draft_model, or none."""
    model: str = ""
    """draft_model: folder, .gguf file, hub id or short name of the model that drafts; it has the same tokenizer."""
    quantization: Literal["auto", "none", "int8", "int4"] = "auto"
    """draft_model: weights of the model that drafts, with the meaning that the setting has for the model."""
    max_model_len: Positive | None = None
    """draft_model: tokens of a text beyond which nothing is drafted; by default that model's context."""
    draft_tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    """draft_model: only 1, as the first rank computes that model alone."""
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] | None = None
    """Tokens of a draft, at most; by default 8 with ngram and draft_model, and 16 with suffix."""
    prompt_lookup_max: Positive | None = None
    """ngram: tokens at the end of the text that are compared, at most; by default `prompt_lookup_min`, or 5."""
    prompt_lookup_min: Positive | None = None
    """ngram: tokens that must agree, at least; by default `prompt_lookup_max`, or 5."""
    suffix_decoding_max_tree_depth: Positive = 24
    """suffix: tokens at the end of the text that are compared, at most."""
    suffix_decoding_max_spec_factor: Annotated[float, msgspec.Meta(gt=0, le=MAX_TOKENS)] = 1.0
    """suffix: tokens of a draft per token that agrees, at most."""
    suffix_decoding_min_token_prob: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    """suffix: share of the earlier places below which a draft ends."""
    suffix_decoding_max_cached_requests: Annotated[int, msgspec.Meta(ge=0)] = 10_000
    """suffix: earlier outputs of a tenant that are searched, too; 0: only the request's own text is."""

    @property
    def tokens(self) -> int:
        """Tokens of a draft, at most."""
        return self.num_speculative_tokens or _TOKENS[self.method]

    @property
    def lookup(self) -> tuple[int, int]:
        """Least and greatest number of tokens that method ngram compares."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        return least or most or NGRAM_LENGTH, most or least or NGRAM_LENGTH


def speculation(settings: Settings) -> SpeculativeConfig | None:
    """Returns how tokens are drafted; None: not at all. `device` is resolved.

    Raises:
        ConfigurationError: a setting is malformed, or the method is not supported.
    """
    config = _parsed(settings.speculative_config) if settings.speculative_config else SpeculativeConfig()
    method, spec_type = config.method, settings.spec_type
    if method and spec_type not in ("auto", method):
        raise ConfigurationError(f"spec-type is {spec_type}, and speculative-config says {method}: set one of them")
    if not method:
        method = spec_type if spec_type != "auto" else _default(config)
    if method in PLANNED:
        raise ConfigurationError(
            f"speculation by {method} is not supported yet: set spec-type to suffix, ngram or draft_model"
        )
    if method == "none":
        return None
    if method not in METHODS:
        hint = did_you_mean(method, (*METHODS, "none"))
        raise ConfigurationError(
            f"there is no method {method!r} of speculation{hint}: set {', '.join(METHODS)} or none"
        )
    if (method == "draft_model") != bool(config.model):
        raise ConfigurationError(
            "spec-type draft_model needs the key model of speculative-config, and no other method has it: set both"
        )
    for key, owner in _set_keys(config).items():
        if owner != method:
            raise ConfigurationError(
                f"speculative-config has {key}, a key of method {owner}, not of {method}: remove it"
            )
    least, most = config.lookup
    if least > most:
        raise ConfigurationError(f"prompt_lookup_min is {least}, more than prompt_lookup_max, {most}")
    return msgspec.structs.replace(config, method=method)


def draft_model(settings: Settings) -> Settings | None:
    """Returns the settings of the model that drafts; None: there is none. `device` is resolved.

    Raises:
        ConfigurationError: as `speculation` does.
    """
    config = speculation(settings)
    if config is None or config.method != "draft_model":
        return None
    return msgspec.structs.replace(
        settings,
        model=config.model,
        revision="",
        tokenizer="",
        quantization=config.quantization,
        max_model_len=config.max_model_len,
        enable_lora=False,
        spec_type="none",
        speculative_config="",
    )


def with_draft_model(settings: Settings, model: str) -> Settings:
    """Returns the settings with another name of the model that drafts, such as the path of a model that was fetched."""
    config = msgspec.structs.replace(_parsed(settings.speculative_config), model=model)
    return msgspec.structs.replace(settings, speculative_config=msgspec.json.encode(config).decode())


def _default(config: SpeculativeConfig) -> str:
    """Returns the method where none is named: the first one of which a key is set; suffix for the number of tokens."""
    unnamed = "none" if config.num_speculative_tokens is None else "suffix"
    return next(iter(_set_keys(config).values()), unnamed)


def _set_keys(config: SpeculativeConfig) -> dict[str, str]:
    """Returns the methods of the keys that are set to another value than their default."""
    default = SpeculativeConfig()
    return {
        key: method for method, keys in _KEYS.items() for key in keys if getattr(config, key) != getattr(default, key)
    }


def _parsed(text: str) -> SpeculativeConfig:
    try:
        return msgspec.json.decode(text, type=SpeculativeConfig)
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"speculative-config is not what it must be: {error}") from error
