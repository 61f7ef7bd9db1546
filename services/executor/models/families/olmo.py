"""OLMo 2: norms behind attention and feed-forward layer, and of all heads together. OLMo 3: OLMo 2 with windows."""

from dataclasses import replace

from typing_extensions import override

from pagewire.services.executor.models.config_json import Positive
from pagewire.services.executor.models.families.llama import LlamaConfig
from pagewire.services.executor.models.families.sliding import Kind, SlidingConfig, ropes_by_kind
from pagewire.services.executor.models.rope import Rope
from pagewire.services.executor.models.spec import DecoderSpec, HeadNorm, Placement


def _olmo(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, placement=Placement.AFTER, head_norm=HeadNorm.TOGETHER)


class Olmo2Config(LlamaConfig, frozen=True, kw_only=True):
    """config.json of OLMo 2."""

    rms_norm_eps: float = 1e-5

    @override
    def spec(self) -> DecoderSpec:
        return _olmo(LlamaConfig.spec(self))


class Olmo3Config(SlidingConfig, frozen=True, kw_only=True):
    """config.json of OLMo 3."""

    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    sliding_window: Positive | None = 4096

    @override
    def default_kind(self, layer: int) -> Kind:
        return "sliding_attention" if (layer + 1) % 4 else "full_attention"

    @override
    def ropes(self) -> tuple[Rope | None, ...]:
        return ropes_by_kind(self, self.rope_theta)

    @override
    def spec(self) -> DecoderSpec:
        return _olmo(SlidingConfig.spec(self))
