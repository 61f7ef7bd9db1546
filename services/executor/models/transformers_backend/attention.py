"""Pagewire's attention as an implementation that `transformers` can choose."""

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from pagewire.services.executor.models.model import AttentionFn
from pagewire.shared.errors import ConfigurationError

NAME = "pagewire"
"""Name of the implementation. No mask is registered for it, so that `transformers` creates none."""
PROBE = "pagewire_probe"
"""Name of the attention that passes masks on, for `Recorder`."""
EAGER = "eager"
"""The attention of a model's own file."""
HANDLE = "pagewire_kv"
"""Name of the attribute of an attention module that holds its `Handle`."""


class Handle(Protocol):
    """Receives the calls of a layer's attention."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: Any, **options: Any
    ) -> Tensor:
        """[1, Hq, T, d], [1, Hkv, T, d], [1, Hkv, T, dv] -> [1, T, Hq, dv], as `transformers` calls it."""


class Mask:
    """A mask as a function of positions. It takes the place of the tensor, which no attention of this project reads."""

    def __init__(self, sees: Callable[..., Any]) -> None:
        self.sees = sees
        """(batch, head, query position, key position) -> whether the query sees the key."""

    def __getattr__(self, name: str) -> Any:
        raise ConfigurationError("it reads the mask of attention itself")

    def __getitem__(self, parts: Any) -> Any:
        """Returns the mask itself for all its positions: Gemma 4 cuts off queries that need no logits."""
        whole = isinstance(parts, tuple) and all(part in (slice(None), slice(0, None)) for part in parts)
        return self if whole else self._read()

    def _read(self, *_others: Any) -> Any:
        return self.shape

    __add__ = __radd__ = __mul__ = __rmul__ = __rsub__ = __invert__ = _read


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    handle: Handle = getattr(module, HANDLE)
    return handle(module, query, key, value, attention_mask, scaling, **options), None


def _mask(mask_function: Callable[..., Any], **_options: Any) -> Mask:
    return Mask(mask_function)


AttentionInterface.register(NAME, _attend)
AttentionInterface.register(PROBE, _attend)
AttentionMaskInterface.register(PROBE, _mask)


class Step:
    """The attention of the step that runs, which the layers of a model share."""

    attend: AttentionFn
    positions: Tensor
    """[T], int64."""


class PastPositions:
    """The cache of a layer that asks it for the positions of a step, and gets its own keys and values back."""

    def __init__(self, positions: Tensor) -> None:
        self._positions = positions

    def get_seq_length(self, *_layer: int) -> Tensor:
        """Returns what a token's index in the step lacks to its position [T]."""
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def update(self, keys: Tensor, values: Tensor, *_layer: int, **_options: Any) -> tuple[Tensor, Tensor]:
        """Returns the step's own keys and values: the layer's `Handle` has the others."""
        return keys, values


def asks_for_length(module: nn.Module) -> bool:
    """Returns whether an attention module computes positions from the length of its cache, as that of Llama 4 does."""
    return "get_seq_length" in inspect.getsource(type(module))


class PagedLayer:
    """The `Handle` of a layer: attention over the KV pool of the device."""

    def __init__(self, step: Step, layer: int) -> None:
        self._step, self._layer = step, layer

    def __call__(
        self, _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Any, _scaling: Any, **options: Any
    ) -> Tensor:
        """Attends over the KV pool, with the constants of `ModelSpec.layers` in place of the arguments'."""
        q, k, v = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
        sinks = options.get("s_aux")
        out = self._step.attend(self._layer, q, k, v, None if sinks is None else sinks.float())
        return out.to(torch.result_type(query, value))[None] if out.dtype != query.dtype else out[None]
