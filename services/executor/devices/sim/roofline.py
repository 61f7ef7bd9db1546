"""Estimates the time of a step on a GPU: for each part, the larger of the compute time and the memory time.

Source: Williams et al., "Roofline: an insightful visual performance model", 2009. The peaks are from NVIDIA's data
sheets; `Efficiency` states the share of them that real kernels reach, and the compiled code of the attention of prompts
says how much that costs. All times from this module are simulated.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagewire.services.executor.devices.protocol import Bool, Int64
from pagewire.services.executor.models.registry import build_model
from pagewire.shared.errors import ConfigurationError

BYTES = 2
"""Bytes of a weight, an activation and an element of the KV cache: bf16."""
_UNLIMITED = 1 << 40
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peak performance of one GPU."""

    flops: float
    """Dense bf16 operations per second."""
    bandwidth: float
    """Memory bandwidth, bytes per second."""
    memory: int
    """Memory size, bytes."""
    link: float
    """Bandwidth to other GPUs, bytes per second in one direction."""
    issue: float
    """Instructions of warps per second: four per cycle and multiprocessor."""
    arch: int
    """Compute capability times ten."""


GPUS: Mapping[str, Gpu] = {
    # A100 80GB SXM data sheet, 2021: NVLink 600 GB/s both ways
    "a100-80": Gpu(312e12, 2.039e12, 80 * _GIB, 300e9, 4 * 108 * 1.41e9, 80),
    # H100 SXM data sheet, 2022: half of the figure with sparsity
    "h100": Gpu(989.4e12, 3.35e12, 80 * _GIB, 450e9, 4 * 132 * 1.83e9, 90),
    # H200 SXM data sheet, 2023
    "h200": Gpu(989.4e12, 4.8e12, 141 * _GIB, 450e9, 4 * 132 * 1.83e9, 90),
    # L40S data sheet, 2023: PCIe 4.0 x16, 64 GB/s both ways
    "l40s": Gpu(362.05e12, 0.864e12, 48 * _GIB, 32e9, 4 * 142 * 2.52e9, 89),
}


@dataclass(frozen=True, slots=True)
class PromptTile:
    """One pass of the inner loop of `kernels.triton.attention.paged_attention`, heads of 128 numbers in bf16."""

    rows: int
    """Queries times heads."""
    keys: int
    instructions: int
    """Instructions of each warp, in the compiled code: tests/kernels/triton/test_machine_code.py counts them again."""
    warps: int = 8

    @property
    def instructions_per_flop(self) -> float:
        """Instructions of warps per operation of the two products."""
        return self.instructions * self.warps / (4.0 * self.rows * self.keys * 128)


PROMPT_TILES = {
    80: PromptTile(128, 32, 305),
    89: PromptTile(128, 32, 305),
    90: PromptTile(128, 64, 401),
}
"""The tile of each GPU, by compute capability times ten."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the peaks that kernels reach, and the fixed costs of a step, as an H200 showed them.

    `tests/services/executor/devices/sim/test_roofline.py` compares the times with those that were measured there.
    """

    compute: float = 0.65
    bandwidth: float = 0.85
    link: float = 0.7
    all_reduce: float = 15e-6
    """Seconds before an all-reduce moves its first byte."""
    launch: float = 150e-6
    """Fixed seconds of a step: launching the graph, sampling, copying tokens to the host."""
    layer: float = 26e-6
    """Seconds of a layer's kernels that neither multiply nor attend: norms, rotation, cache writes, activations."""
    reserved: int = 2 * _GIB
    """Bytes of each GPU for activations and the runtime."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that determine the time of a step."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    windows: tuple[int, ...]
    """Per layer, number of positions that a query sees; 0: all."""
    layer_weights: int
    """Number of parameters of all layers."""
    weights: int
    """Number of parameters of the model."""


def shape_of(config: dict[str, Any]) -> ModelShape:
    """Returns the shape of the model that a config.json describes. Weights are counted, not allocated.

    Raises:
        ConfigurationError: the architecture is not supported, a value is missing, or the weights are quantized.
    """
    if "quantization_config" in config:
        raise ConfigurationError("steps of quantized models are not simulated: use the model in bf16")
    model = build_model(config)
    spec, embedded = model.spec, model.embedding.numel()
    first = spec.layers[0]
    weights = sum(parameter.numel() for parameter in model.parameters())
    outside = embedded if model.lm_head is None else 2 * embedded
    return ModelShape(
        hidden=config["hidden_size"],
        heads=first.heads,
        kv_heads=first.kv_heads,
        head_dim=first.head_size,
        vocab=spec.vocab_size,
        windows=tuple(layer.window for layer in spec.layers),
        layer_weights=weights - outside,
        weights=weights,
    )


class Roofline:
    """Times and sizes of one model on `degree` equal GPUs, which hold equal parts of it (tensor parallelism).

    Attributes:
        kv_bytes: bytes of one position in the KV cache, on all GPUs together.
    """

    def __init__(self, shape: ModelShape, gpu: Gpu, degree: int = 1, efficiency: Efficiency | None = None) -> None:
        self._shape = shape
        self._gpu = gpu
        self._degree = degree
        self._efficiency = efficiency = efficiency or Efficiency()
        self._flops = gpu.flops * efficiency.compute * degree
        self._bandwidth = gpu.bandwidth * efficiency.bandwidth * degree
        self._attention_flops = 1 / (1 / gpu.flops + PROMPT_TILES[gpu.arch].instructions_per_flop / gpu.issue) * degree
        self._link = gpu.link * efficiency.link
        self._windows = Counter(window or _UNLIMITED for window in shape.windows)
        copies = max(degree // shape.kv_heads, 1)  # with more GPUs than KV heads, several hold the same head
        self._kv_layer_bytes = 2 * shape.kv_heads * shape.head_dim * BYTES * copies
        self.kv_bytes = self._kv_layer_bytes * len(shape.windows)

    def kv_memory(self, share: float) -> int:
        """Returns the bytes left for the KV cache when `share` of the memory of all GPUs is used.

        Negative or 0 when the model does not fit.
        """
        usable = self._gpu.memory * share - self._efficiency.reserved
        return int(usable * self._degree) - self._shape.weights * BYTES

    def seconds(self, num_computed_tokens: Int64, query_lens: Int64, samples: Bool) -> float:
        """Returns the seconds of a step with these columns [R] of a `StepBatch`."""
        tokens = int(query_lens.sum())
        return (
            self._efficiency.launch
            + self._efficiency.layer * len(self._shape.windows)
            + self._multiply(tokens, self._shape.layer_weights)
            + self._attend(num_computed_tokens, query_lens)
            + self._multiply(int(samples.sum()), self._shape.vocab * self._shape.hidden)
            + self.collectives(tokens)
        )

    def moved(self, num_computed_tokens: Int64, query_lens: Int64, samples: Bool) -> float:
        """Returns the bytes of weights and KV cache that a step with these columns [R] reads and writes."""
        weights = self._shape.layer_weights + bool(samples.any()) * self._shape.vocab * self._shape.hidden
        return weights * BYTES + self._attention(num_computed_tokens, query_lens)[1]

    def _multiply(self, tokens: int, weights: int) -> float:
        """Returns the seconds of a product of `tokens` vectors with `weights` numbers, each read once."""
        if not tokens:
            return 0.0
        return max(2.0 * tokens * weights / self._flops, weights * BYTES / self._bandwidth)

    def _attend(self, computed: Int64, query_lens: Int64) -> float:
        """Returns the seconds of attention in all layers: each row reads its context once, for all its queries.

        A program of the kernel multiplies and computes weights in turns, so the times of both add up.
        """
        flops, moved = self._attention(computed, query_lens)
        return max(flops / self._attention_flops, moved / self._bandwidth)

    def _attention(self, computed: Int64, query_lens: Int64) -> tuple[float, float]:
        """Returns the operations and the bytes of attention in all layers."""
        flops = moved = 0.0
        for window, layers in self._windows.items():
            growing = np.clip(window - computed, 0, query_lens)  # queries whose context is shorter than the window
            seen = growing * computed + growing * (growing + 1) // 2 + (query_lens - growing) * window
            read = np.minimum(computed + query_lens, window + query_lens - 1)
            flops += layers * 4.0 * self._shape.heads * self._shape.head_dim * int(seen.sum())
            moved += layers * float(self._kv_layer_bytes) * int((read + query_lens).sum())
        return flops, moved

    def collectives(self, tokens: int) -> float:
        """Returns the seconds of two ring all-reduces per layer, of one hidden state per token; 0 on one GPU."""
        if self._degree == 1:
            return 0.0
        moved = 2 * (self._degree - 1) / self._degree * tokens * self._shape.hidden * BYTES
        return 2 * len(self._shape.windows) * (self._efficiency.all_reduce + moved / self._link)
