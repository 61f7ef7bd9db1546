"""SmolLM3: Llama in which every fourth layer rotates nothing."""

from typing import Literal

from typing_extensions import override

from pagewire.services.executor.models.config_json import Positive
from pagewire.services.executor.models.families.sliding import Kind, SlidingConfig
from pagewire.services.executor.models.rope import Rope


class SmolLM3Config(SlidingConfig, frozen=True, kw_only=True):
    """config.json of SmolLM3."""

    tie_word_embeddings: bool = True
    rope_theta: float = 2e6
    use_sliding_window: bool = False
    no_rope_layers: tuple[Literal[0, 1], ...] | None = None
    """Per layer, 1 if it rotates; by default all layers do but multiples of `no_rope_layer_interval`."""
    no_rope_layer_interval: Positive = 4

    def __post_init__(self) -> None:
        SlidingConfig.__post_init__(self)
        if self.no_rope_layers is not None and len(self.no_rope_layers) < self.num_hidden_layers:
            raise ValueError("no_rope_layers has fewer than num_hidden_layers entries")

    def _rotates(self, layer: int) -> bool:
        if self.no_rope_layers is not None:
            return bool(self.no_rope_layers[layer])
        return (layer + 1) % self.no_rope_layer_interval != 0

    @override
    def ropes(self) -> tuple[Rope | None, ...]:
        return tuple(self.rope if self._rotates(layer) else None for layer in range(self.num_hidden_layers))

    @override
    def default_kind(self, layer: int) -> Kind:
        return "full_attention" if self._rotates(layer) else "sliding_attention"

    @property
    @override
    def windows(self) -> tuple[int, ...]:
        return self.sliding() if self.use_sliding_window else (0,) * self.num_hidden_layers
