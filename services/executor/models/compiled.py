"""A model with compiled kernels in place of its layers. Activations are float32, weights keep their dtype.

Weights are packed once; integers are packed when they are loaded. On a CPU with instructions for bf16 tiles, oneDNN
computes the large products in bf16, because it uses these instructions. All other products use the kernels of this
project, which read every dtype and sum in float32.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from pagewire.kernels import attention_layer
from pagewire.kernels.cpu.decoder import CompiledDecoder, Layer, Pool
from pagewire.kernels.cpu.kernels import Batch, CpuKernels, Int64
from pagewire.kernels.cpu.packed import Packed, table
from pagewire.services.executor.models.decoder import DecoderLM
from pagewire.services.executor.models.layers import PackedLinear, RMSNorm, SiluMul
from pagewire.services.executor.models.model import AttentionFn, CausalLM
from pagewire.services.executor.models.rope import RotaryEmbedding, Rotate

ONE_DNN_FROM = 1 << 18
"""Minimum number of weights for which a product by oneDNN is worth its call."""


class Attention(msgspec.Struct, frozen=True):
    """The attention of one step, an `AttentionFn`."""

    kernels: CpuKernels
    batches: Sequence[Batch]
    """With the block tables of each group of layers."""
    groups: Sequence[int]
    """Group of each layer."""
    layers: Sequence[attention_layer.Attention]
    """See `ModelSpec.layers`."""
    pools: Sequence[Pool]
    """KV pool of each layer."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionFn`."""
        if q.dtype != torch.float32:
            return self(layer, q.float(), k.float(), v.float(), sinks).to(q.dtype)
        batch = self.batches[self.groups[layer]]
        return self.kernels.attend(batch, self.layers[layer], self.pools[layer], q, k, v, sinks)


class CompiledLM(CausalLM):
    """Wraps `model` and replaces its layers in place; `model` must not be used directly afterwards."""

    def __init__(self, model: CausalLM, kernels: CpuKernels, max_model_len: int, *, one_dnn: bool) -> None:
        super().__init__(model.spec, width=1, tied=True)
        for parent in list(model.modules()):
            for name, module in parent.named_children():
                setattr(parent, name, _compiled(module, kernels, max_model_len, one_dnn=one_dnn))
        for parameter in model.parameters():
            if parameter.dim() == 1:  # of norms; tables keep their dtype
                parameter.data = parameter.data.float()
        self.model = model
        self.decoder = _fused(model, kernels) if isinstance(model, DecoderLM) else None
        """All layers as one call; None unless all of them are kernels of this project."""
        self._logits = torch.empty(0)
        self.head = model.lm_head or _linear(model.embedding, None, kernels, one_dnn=one_dnn)
        # Looked up once: finding a submodule by its name takes as long as calling it.
        self._argmax = self.head.argmax if isinstance(self.head, Linear) else None

    @property
    def embedding(self) -> Tensor:
        """[V, D]."""
        return self.model.embedding

    def forward(self, token_ids: Tensor, positions: Tensor, attend: AttentionFn) -> Tensor:
        """See `CausalLM.forward`."""
        if self.decoder is not None and isinstance(attend, Attention):
            return self.decoder(token_ids, positions, attend.batches[0], attend.pools)
        out: Tensor = self.model(token_ids, positions, attend)
        return out

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `CausalLM.logits`. Without `out` the next call overwrites the result: freeing and allocating so much
        memory can take longer than the product.
        """
        if not isinstance(self.head, Linear):
            product: Tensor = self.head(hidden)
            return product if out is None else out.copy_(product)
        if out is None and len(hidden) > len(self._logits):
            self._logits = torch.empty(len(hidden), self.head.weights.outputs)
        return self.head.forward(hidden, self._logits[: len(hidden)] if out is None else out)

    def argmax(self, hidden: Tensor) -> Int64 | None:
        """See `CausalLM.argmax`."""
        return self._argmax(hidden) if self._argmax is not None else None


class Embedding(nn.Module):
    """`nn.Embedding` with float32 output."""

    def __init__(self, rows: Packed, weight: Tensor, kernels: CpuKernels) -> None:
        """`rows` are those of `weight` [V, D], which has no memory if they are integers."""
        super().__init__()
        self.rows, self.weight = rows, weight
        self._kernels = kernels

    def forward(self, ids: Tensor) -> Tensor:
        """[T] -> [T, D]."""
        return self._kernels.embed(self.rows, ids)


class Norm(nn.Module):
    """`RMSNorm` as a compiled kernel."""

    def __init__(self, plain: RMSNorm, kernels: CpuKernels) -> None:
        super().__init__()
        self.weight, self.eps = plain.weight, plain.eps
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] or [T, H, D] -> the same shape."""
        return self._kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `RMSNorm.add`."""
        total = x + residual
        return self(total), total


class Activation(nn.Module):
    """`SiluMul` as a compiled kernel."""

    def __init__(self, kernels: CpuKernels) -> None:
        super().__init__()
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """[T, 2 inner] -> [T, inner]."""
        return self._kernels.silu_mul(x)


class Rotary(nn.Module):
    """`RotaryEmbedding` with a table of the cosines and sines of all positions."""

    def __init__(self, plain: RotaryEmbedding, kernels: CpuKernels, max_model_len: int) -> None:
        super().__init__()
        self.table = plain.table(torch.arange(max_model_len))
        self._kernels = kernels

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotate:
        """See `RotaryEmbedding.forward`; the dtype is float32."""

        def rotate(x: Tensor) -> Tensor:
            self._kernels.rotate(x, self.table, positions)
            return x

        return rotate


class Linear(nn.Module):
    """A matrix product in float32."""

    def __init__(self, weights: Packed, kernels: CpuKernels) -> None:
        super().__init__()
        self.weights = weights
        self._kernels = kernels

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, inputs] -> [T, outputs], written to `out` if it is given."""
        return self._kernels.linear(x, self.weights, out)

    def argmax(self, x: Tensor) -> Int64:
        """[T, inputs] -> [T] index of the largest output."""
        return self._kernels.linear_argmax(x, self.weights)


class OneDnnLinear(nn.Module):
    """A matrix product with bf16 factors, summed in float32 and rounded to bf16."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._bias = bias
        self._multiply: Any = torch.ops.mkldnn._linear_pointwise
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)

    def forward(self, x: Tensor) -> Tensor:
        """[T, inputs] -> [T, outputs]."""
        out: Tensor = self._multiply(x.bfloat16(), self._weight, self._bias, "none", [], "").float()
        return out


def _compiled(module: nn.Module, kernels: CpuKernels, max_model_len: int, *, one_dnn: bool) -> nn.Module:
    """Returns the replacement of a module, or the module itself if there is no kernel for it."""
    match module:
        case nn.Linear() | PackedLinear():
            return _linear(module.weight, module.bias, kernels, one_dnn=one_dnn)
        case nn.Embedding():
            return Embedding(table(module.weight), module.weight, kernels)
        case RMSNorm():
            return Norm(module, kernels)
        case SiluMul():
            return Activation(kernels)
        case RotaryEmbedding():
            return Rotary(module, kernels, max_model_len)
        case _:
            return module


def _linear(weight: Tensor, bias: Tensor | None, kernels: CpuKernels, *, one_dnn: bool) -> nn.Module:
    if one_dnn and weight.dtype == torch.bfloat16 and weight.numel() >= ONE_DNN_FROM:
        return OneDnnLinear(weight, bias)
    return Linear(kernels.pack(weight, bias), kernels)


def _fused(model: DecoderLM, kernels: CpuKernels) -> CompiledDecoder | None:
    """Returns all layers of `model`, whose modules are already replaced, as one call; None if any uses oneDNN, or if
    the layers do not share one block table."""
    decoder = model.model
    if len(model.spec.groups.windows) > 1 or any(isinstance(module, OneDnnLinear) for module in decoder.modules()):
        return None
    layers = [_layer(layer, spec.window) for layer, spec in zip(decoder.layers, model.spec.layers, strict=True)]
    norm: Any = decoder.norm
    rotary: Any = decoder.rotary
    first: Any = decoder.layers[0]
    heads = first.self_attn.heads
    embedding: Any = decoder.embed_tokens
    return CompiledDecoder(kernels, embedding.rows, layers, norm.weight, rotary.table, norm.eps, heads)


def _layer(layer: Any, window: int) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        input_norm=layer.input_layernorm.weight,
        post_attention_norm=layer.post_attention_layernorm.weight,
        q_norm=attention.q_norm and attention.q_norm.weight,
        k_norm=attention.k_norm and attention.k_norm.weight,
        qkv=attention.qkv_proj.weights,
        o=attention.o_proj.weights,
        gate_up=mlp.gate_up_proj.weights,
        down=mlp.down_proj.weights,
        window=window,
    )
