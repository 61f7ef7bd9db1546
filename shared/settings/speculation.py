"""How tokens are drafted: the settings `spec-type` and `speculative-config`, with vLLM's keys."""

from typing import Annotated

import msgspec

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.settings.config import Positive, Settings
from pagewire.shared.settings.spelling import did_you_mean

METHODS = ("ngram", "suffix")
"""Methods that draft."""
PLANNED = ("draft_model", "eagle3", "mtp")
"""Methods that are refused by name: they need weights beside the model's own."""
NGRAM_TOKENS = 8
"""Tokens of a draft of method ngram, at most, where none are set."""
SUFFIX_TOKENS = 16
"""Tokens of a draft of method suffix, at most, where none are set."""
NGRAM_LENGTH = 5
"""Tokens that method ngram compares where neither bound is set, as in vLLM."""
MAX_TOKENS = 64
"""Tokens of a draft that can be set at most."""


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The keys of `speculative-config`."""

    method: str = ""
    """ngram, suffix, or none."""
    model: str = ""
    """Draft model, which no method here has."""
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] | None = None
    """Tokens of a draft, at most; by default 8 with ngram, and 16 with suffix."""
    prompt_lookup_max: Positive | None = None
    """ngram: tokens at the end of the text that are compared, at most; by default `prompt_lookup_min`, or 5."""
    prompt_lookup_min: Positive | None = None
    """ngram: tokens that must agree, at least; by default `prompt_lookup_max`, or 5."""
    suffix_decoding_max_tree_depth: Positive = 24
    """suffix: tokens at the end of the text that are compared, at most."""
    suffix_decoding_max_spec_factor: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """suffix: tokens of a draft per token that agrees, at most."""
    suffix_decoding_min_token_prob: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    """suffix: share of the earlier places below which a draft ends."""
    suffix_decoding_max_cached_requests: Annotated[int, msgspec.Meta(ge=0, le=0)] = 0
    """suffix: earlier requests whose outputs are searched; only 0, which searches the request's own text."""

    @property
    def tokens(self) -> int:
        """Tokens of a draft, at most."""
        return self.num_speculative_tokens or (NGRAM_TOKENS if self.method == "ngram" else SUFFIX_TOKENS)

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
        method = spec_type if spec_type != "auto" else _default(settings, config)
    if method in PLANNED or config.model:
        name = method if method in PLANNED else "draft_model"
        raise ConfigurationError(f"speculation by {name} is not supported yet: set spec-type to suffix or ngram")
    if method == "none":
        return None
    if method not in METHODS:
        hint = did_you_mean(method, (*METHODS, "none"))
        raise ConfigurationError(
            f"there is no method {method!r} of speculation{hint}: set {', '.join(METHODS)} or none"
        )
    least, most = config.lookup
    if least > most:
        raise ConfigurationError(f"prompt_lookup_min is {least}, more than prompt_lookup_max, {most}")
    return msgspec.structs.replace(config, method=method)


def _default(settings: Settings, config: SpeculativeConfig) -> str:
    """Returns the method where none is named: that of the keys that are set, else the device's."""
    if config.prompt_lookup_max or config.prompt_lookup_min:
        return "ngram"
    return "suffix" if config != SpeculativeConfig() else "none"


def _parsed(text: str) -> SpeculativeConfig:
    try:
        return msgspec.json.decode(text, type=SpeculativeConfig)
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"speculative-config is not what it must be: {error}") from error
