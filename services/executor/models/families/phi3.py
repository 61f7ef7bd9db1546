"""Phi-3 and Phi-4: Llama with whole matrices in its checkpoints, heads that may be rotated in part, and longrope."""

from dataclasses import replace

from pagewire.services.executor.models.config_json import Positive
from pagewire.services.executor.models.families.mistral import MistralConfig
from pagewire.services.executor.models.rope import Rope, read_rope
from pagewire.services.executor.models.spec import DecoderSpec, Storage


class Phi3Config(MistralConfig, frozen=True, kw_only=True):
    """config.json of Phi-3 and Phi-4."""

    rms_norm_eps: float = 1e-5
    original_max_position_embeddings: Positive | None = None
    partial_rotary_factor: float | None = None

    @property
    def rope(self) -> Rope:
        """See `LlamaConfig.rope`. Early checkpoints call longrope "su" or "yarn"."""
        given = dict(self.rope_parameters or self.rope_scaling or {})
        kind = given.get("rope_type", given.get("type", "default"))
        given["rope_type"] = "longrope" if kind in {"su", "yarn"} else kind
        if self.original_max_position_embeddings is not None:
            given.setdefault("original_max_position_embeddings", self.original_max_position_embeddings)
        given.setdefault("partial_rotary_factor", self.partial_rotary_factor or 1.0)
        return read_rope(given, self.rope_theta, self.max_position_embeddings, partial=None)

    def spec(self) -> DecoderSpec:
        """See `LlamaConfig.spec`."""
        return replace(MistralConfig.spec(self), storage=Storage.WHOLE)
