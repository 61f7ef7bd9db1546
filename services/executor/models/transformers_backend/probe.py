"""Finds out how a model attends: it runs once without data, and every call of attention is recorded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from pagewire.kernels.attention_layer import Attention
from pagewire.services.executor.models.transformers_backend.attention import HANDLE, PROBE, Mask
from pagewire.shared.errors import ConfigurationError

TOKENS = 5
HARMLESS = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
        "layer_idx",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "s_aux",
        "sliding_window",
        "softcap",
        "use_cache",
    }
)
"""Options of attention that are followed, or that change nothing in inference."""


class Recorder:
    """A `Handle` that only writes down the constants of each call.

    Attributes:
        layers: the attention of each call, in order.
        modules: the module of each call.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self._config = config
        self.layers: list[Attention] = []
        self.modules: list[nn.Module] = []

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: Any, **options: Any
    ) -> Tensor:
        """Records a call of a layer's attention.

        Raises:
            ConfigurationError: the attention cannot be computed.
        """
        place = f"layer {len(self.layers)}"
        unknown = sorted(name for name, value in options.items() if value is not None and name not in HARMLESS)
        if unknown:
            raise ConfigurationError(f"{place} attends with {', '.join(unknown)}")
        if options.get("is_causal", getattr(module, "is_causal", True)) is False:
            raise ConfigurationError(f"{place} attends to later positions too")
        if module in self.modules:
            raise ConfigurationError(f"{place} attends more than once, and would need more than one KV cache")
        if query.dim() != 4 or query.shape[0] != 1 or query.shape[2] != TOKENS or key.shape[2] != TOKENS:
            raise ConfigurationError(f"{place} does not attend to the positions of its input alone")
        heads, kv_heads = query.shape[1], key.shape[1]
        if value.shape[1] != kv_heads or heads % kv_heads:
            raise ConfigurationError(f"{place} has {heads} heads of queries for {kv_heads} of keys")
        window, chunk = self._bounds(module, options, mask)
        layer = Attention(
            heads,
            kv_heads,
            head_size=query.shape[3],
            scale=float(query.shape[3] ** -0.5 if scaling is None else scaling),
            window=window,
            chunk=chunk,
            soft_cap=float(options.get("softcap") or 0.0),
            value_size=value.shape[3],
        )
        _check_mask(place, mask, layer)
        self.layers.append(layer)
        self.modules.append(module)
        return value.new_zeros(1, TOKENS, heads, value.shape[3])

    def _bounds(self, module: nn.Module, options: dict[str, Any], mask: Any) -> tuple[int, int]:
        """Returns window and chunk, as `Attention` has them."""
        kinds, index = getattr(self._config, "layer_types", None), getattr(module, "layer_idx", None)
        kind = kinds[index] if kinds and isinstance(index, int) and index < len(kinds) else ""
        if kind == "chunked_attention":
            return 0, int(self._config.attention_chunk_size)
        window = options.get("sliding_window")
        if window is None and kind == "sliding_attention" and isinstance(mask, Mask):
            window = getattr(self._config, "sliding_window", None)  # by the mask alone
        if not window and not kind and getattr(self._config, "sliding_window", None):
            raise ConfigurationError("its layers do not follow the sliding_window of config.json")
        return int(window or 0), 0


def _check_mask(place: str, mask: Any, layer: Attention) -> None:
    """Compares what the model's own mask lets a query see, at the ends of windows and chunks, with `layer`.

    Raises:
        ConfigurationError: the two differ.
    """
    if mask is None:
        return
    if not isinstance(mask, Mask):
        raise ConfigurationError(f"{place} attends with a mask of its own")
    length = layer.window or layer.chunk or 64
    zero = torch.zeros((), dtype=torch.long)
    for query in sorted({0, 1, length - 1, length, length + 1, 2 * length + 3}):
        first = query // layer.chunk * layer.chunk if layer.chunk else 0
        if layer.window:
            first = max(0, query - layer.window + 1)
        for key in sorted({0, max(first - 1, 0), first, first + 1, max(query - 1, 0), query, query + 1}):
            try:
                sees = bool(mask.sees(zero, zero, torch.tensor(query), torch.tensor(key)))
            except (NotImplementedError, RuntimeError):  # it reads other inputs, which have no data
                return
            if sees != (first <= key <= query):
                word = "sees" if sees else "does not see"
                raise ConfigurationError(f"{place} has a mask of its own: position {query} {word} position {key}")


@contextmanager
def _handled(model: nn.Module, handle: Any) -> Iterator[None]:
    """Sets the handle of all modules, within the context."""
    for module in model.modules():
        setattr(module, HANDLE, handle)
    try:
        yield
    finally:
        for module in model.modules():
            delattr(module, HANDLE)


def _no_experts(_module: nn.Module, hidden_states: Tensor, *_routing: Any, **_named: Any) -> Tensor:
    """Takes the place of a mixture of experts, whose products depend on data."""
    return torch.zeros_like(hidden_states)


ALL_EXPERTS_FUNCTIONS.register(PROBE, _no_experts)


def probe(model: PreTrainedModel) -> tuple[Recorder, int]:
    """Returns what the model's attention was called with, and the size of the vocabulary.

    Raises:
        ConfigurationError: attention is not called as a decoder on a paged KV cache can serve it.
    """
    recorder = Recorder(model.config)
    experts = getattr(model.config, "_experts_implementation", None)
    model.set_attn_implementation(PROBE)
    model.config._experts_implementation = PROBE
    device = model.get_input_embeddings().weight.device
    try:
        with _handled(model, recorder), torch.inference_mode():
            ids = torch.zeros(1, TOKENS, dtype=torch.long, device=device)
            # With a mask of two dimensions no packed sequences are looked for in the positions, which takes data.
            out = model(
                input_ids=ids,
                position_ids=torch.arange(TOKENS, device=device)[None],
                attention_mask=torch.ones_like(ids),
                use_cache=False,
            )
    finally:
        model.config._experts_implementation = experts
    layers = model.config.num_hidden_layers
    if len(recorder.layers) != layers:
        raise ConfigurationError(f"attention is called {len(recorder.layers)} times in {layers} layers")
    return recorder, int(out.logits.shape[-1])
