"""The sampling defaults of a model's generation_config, for fields that a request leaves out."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from pagewire.services.tokenizer.validation import sampling_checks
from pagewire.shared.client_protocol.client_requests import decode_request
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import SamplingParams
from pagewire.shared.messages.open import Encoding
from pagewire.shared.sampling_parameters import PARAMETERS

FIELDS = tuple(parameter.name for parameter in PARAMETERS)
"""Fields of generation_config that `SamplingParams` has under the same name, as in vLLM."""
MAX_NEW_TOKENS = "max_new_tokens"
"""The name of `max_tokens` in generation_config."""

_NEUTRAL = SamplingParams()
_log = structlog.get_logger()


class _SamplingFields(msgspec.Struct):
    """The sampling fields that a request has; only their names are used."""

    sampling: dict[str, msgspec.Raw] = {}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The defaults of one model. They override the defaults of `SamplingParams`, and a request overrides both."""

    fields: dict[str, Any] = field(default_factory=dict)
    """Default of each field, by its name in `SamplingParams`."""
    max_new_tokens: int | None = None
    """Maximum tokens to generate for a request without `max_tokens`; None: as many as the context leaves."""

    def complete(self, params: SamplingParams, data: bytes, encoding: Encoding) -> SamplingParams:
        """Returns `params`, the sampling parameters of the request in `data`, with these defaults for missing fields.

        A beam search is not changed. If a field has its neutral value, the request is decoded again to see whether it
        spells that value out.
        """
        neutral = [name for name in self.fields if getattr(params, name) == getattr(_NEUTRAL, name)]
        if not neutral or params.beam_width is not None:
            return params
        present = decode_request(data, _SamplingFields, encoding).sampling
        return msgspec.structs.replace(params, **{name: self.fields[name] for name in neutral if name not in present})


def generation_defaults(config: dict[str, Any], vocab_size: int) -> GenerationDefaults:
    """Returns the defaults in the content of generation_config.json. Logs one warning with all unusable fields."""
    fields: dict[str, Any] = {}
    ignored: dict[str, str] = {}
    for name in (*FIELDS, MAX_NEW_TOKENS):
        value = config.get(name)
        if value is None:
            continue
        target = "max_tokens" if name == MAX_NEW_TOKENS else name
        try:
            sampling_checks.check(msgspec.convert({target: value}, SamplingParams), vocab_size)
        except (InvalidRequest, msgspec.ValidationError) as error:
            ignored[name] = str(error)
        else:
            fields[target] = value
    if ignored:
        _log.warning("generation_config_ignored", **ignored)
    max_new_tokens = fields.get("max_tokens")
    if max_new_tokens is not None:
        fields["max_tokens"] = None  # the limit is the context or `max_new_tokens`, whichever is less
    return GenerationDefaults(fields, max_new_tokens)
