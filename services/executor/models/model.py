"""What a language model is to a device: a function of a flat batch, with attention given from outside."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from torch import Tensor, nn


class AttentionFn(Protocol):
    """Causal attention over everything that a row has seen. It belongs to the device, which owns the KV cache.

    A call writes `k` and `v` at the positions of the batch, then attends from `q` with the scale d ** -0.5. Which rows
    and blocks these are is prepared once per step, outside of the model: what a layer launches depends on shapes alone,
    so a device may put a kernel here and capture the whole model as a graph.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[T, Hq, d], [T, Hkv, d], [T, Hkv, d] -> [T, Hq, d]; query head h reads KV head h // (Hq // Hkv)."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a device must know of a model before it runs it."""

    vocab_size: int
    """Rows of the embedding."""
    num_kv_heads: int
    """KV heads of each layer."""
    head_dim: int
    """Numbers per head."""
    windows: tuple[int, ...]
    """Per layer, how many positions a query sees, its own included; 0: all."""


class CausalLM(nn.Module, ABC):
    """A decoder-only model. The parameters have the checkpoint's names, except for the parts of a `PackedLinear`."""

    def __init__(self, spec: ModelSpec, width: int, tied: bool) -> None:
        super().__init__()
        self.spec = spec
        self.lm_head = None if tied else nn.Linear(width, spec.vocab_size, bias=False)

    @property
    @abstractmethod
    def embedding(self) -> Tensor:
        """[V, D] of the input ids, and of the output where there is no `lm_head`."""

    @abstractmethod
    def forward(self, token_ids: Tensor, positions: Tensor, attend: AttentionFn) -> Tensor:
        """Hidden states [T, D] of int64 ids [T] at int64 positions [T]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, V] in float32, for those rows only that sample."""
        head = self.embedding if self.lm_head is None else self.lm_head.weight
        return F.linear(hidden, head).float()

    def argmax(self, hidden: Tensor) -> npt.NDArray[np.int64] | None:
        """[R, D] -> [R] ids of the largest logits, without the logits; None where that is not faster."""
        return None
