"""Families whose layers are of two kinds, some with a sliding window and some without."""

from typing import Annotated, Literal

import msgspec
from typing_extensions import override

from pagewire.services.executor.models.families.llama import LlamaConfig
from pagewire.services.executor.models.rope import Rope, read_rope

Kind = Literal["full_attention", "sliding_attention"]


class SlidingConfig(LlamaConfig, frozen=True, kw_only=True):
    """The fields of config.json that say which layers have a window."""

    sliding_window: Annotated[int, msgspec.Meta(ge=0)] | None = None
    layer_types: tuple[Kind, ...] | None = None

    def __post_init__(self) -> None:
        LlamaConfig.__post_init__(self)
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError("layer_types does not have num_hidden_layers entries")

    def default_kind(self, layer: int) -> Kind:
        """Returns the kind of a layer where config.json has no `layer_types`."""
        return "full_attention"

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of each layer."""
        return self.layer_types or tuple(map(self.default_kind, range(self.num_hidden_layers)))

    @property
    @override
    def windows(self) -> tuple[int, ...]:
        return self.sliding()

    def sliding(self) -> tuple[int, ...]:
        """Returns the windows that the kinds of the layers say."""
        return tuple(self.sliding_window or 0 if kind == "sliding_attention" else 0 for kind in self.kinds)


def ropes_by_kind(config: SlidingConfig, local_theta: float) -> tuple[Rope, ...]:
    """Returns the rotation of each layer of a family whose two kinds of layers rotate by different angles.

    Layers with a window have the base `local_theta` and no scaling, unless `rope_parameters` has an entry of their own.
    """

    def rope(kind: str) -> Rope:
        full, parameters = kind == "full_attention", config.rope_parameters or {}
        theta = config.rope_theta if full else local_theta
        scaling = parameters.get(kind, (config.rope_scaling or parameters) if full else None)
        return read_rope(scaling, theta, config.max_position_embeddings)

    ropes = {kind: rope(kind) for kind in sorted(set(config.kinds))}
    return tuple(ropes[kind] for kind in config.kinds)
