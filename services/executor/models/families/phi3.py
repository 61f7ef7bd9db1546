"""Phi-3 and Phi-4: Llama with whole matrices in its checkpoints, heads that may be rotated in part, and longrope."""

from dataclasses import replace

from typing_extensions import override

from pagewire.services.executor.models.config_json import Positive
from pagewire.services.executor.models.families.mistral import MistralConfig
from pagewire.services.executor.models.rope import Rope, read_rope
from pagewire.services.executor.models.spec import DecoderSpec, Storage


class Phi3Config(MistralConfig, frozen=True, kw_only=True):
    """config.json of Phi-3 and Phi-4."""

    sliding_window: Positive | None = None
    rms_norm_eps: float = 1e-5
    original_max_position_embeddings: Positive | None = None
    partial_rotary_factor: float | None = None

    @property
    @override
    def rope(self) -> Rope:
        """Returns the rotation; early checkpoints call longrope "su" or "yarn"."""
        parameters = dict(self.rope_parameters or self.rope_scaling or {})
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        parameters["rope_type"] = "longrope" if kind in {"su", "yarn"} else kind
        if self.original_max_position_embeddings is not None:
            parameters.setdefault("original_max_position_embeddings", self.original_max_position_embeddings)
        parameters.setdefault("partial_rotary_factor", self.partial_rotary_factor or 1.0)
        return read_rope(parameters, self.rope_theta, self.max_position_embeddings, partial=None)

    @override
    def spec(self) -> DecoderSpec:
        return replace(MistralConfig.spec(self), storage=Storage.WHOLE)
