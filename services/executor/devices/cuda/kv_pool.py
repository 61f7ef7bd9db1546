"""The keys and values of all layers on the GPU, in blocks."""

import torch
from torch import Tensor

from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.devices.cuda.runtime import Runtime
from pagewire.services.executor.devices.protocol import Capacity
from pagewire.services.executor.models.model import ModelSpec


class KVPool:
    """Keys and values of every layer.

    Attributes:
        dummy: id of the block after all others, to which rows that do not run write.
        dtype: dtype of queries and results.
        cached: dtype of the stored keys and values.
    """

    def __init__(
        self,
        spec: ModelSpec,
        capacity: Capacity,
        dtype: torch.dtype,
        runtime: Runtime,
        max_tokens: int,
        cached: torch.dtype | None = None,
    ) -> None:
        """Most steps have up to `max_tokens` tokens, in `dtype`; keys and values are stored as `cached`.

        Keys and values in float8_e4m3fn have no scale: values beyond 448 are clamped.
        """

        self.dtype, self.cached = dtype, cached or dtype

        def cache(layer: Attention, size: int) -> Tensor:
            shape = capacity.num_blocks + 1, layer.kv_heads, capacity.block_size, size
            return torch.zeros(shape, dtype=self.cached, device=runtime.device)

        self.dummy = capacity.num_blocks
        self.layers, self.groups = spec.layers, spec.groups
        shared = [self.layers[i] for i in self.groups.shared]
        caches = [(cache(layer, layer.head_size), cache(layer, layer.value_head_size)) for layer in shared]
        self.caches = [caches[place] for place in self.groups.places]
        self._attended = {
            sizes: torch.zeros(max_tokens, *sizes, dtype=dtype, device=runtime.device)
            for sizes in {(layer.heads, layer.value_head_size) for layer in self.layers}
        }

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies block `sources[i]` of every layer to block `targets[i]`, int32 on the device; no target is a source.

        Blocks are copied as bytes: not every operation knows float8.
        """
        for layer in self.groups.shared:
            for cache in self.caches[layer]:
                blocks = cache.view(len(cache), -1).view(torch.uint8)
                blocks.index_copy_(0, targets.long(), blocks.index_select(0, sources.long()))

    def attended(self, tokens: int) -> dict[tuple[int, int], Tensor]:
        """Returns the output buffers of attention [tokens, Hq, dv] by (Hq, dv), which all layers and steps share.

        They are initialised, because kernels do not write the padding after a step's tokens.
        """
        return {
            sizes: out[:tokens] if tokens <= len(out) else out.new_zeros(tokens, *sizes)
            for sizes, out in self._attended.items()
        }

    @staticmethod
    def bytes_per_block(spec: ModelSpec, block_size: int, cached: torch.dtype) -> int:
        """Returns the bytes of one block over all layers of a group."""
        layers = (spec.layers[i] for i in spec.groups.shared)
        numbers = sum(layer.kv_heads * (layer.head_size + layer.value_head_size) for layer in layers)
        return numbers * block_size * cached.itemsize
