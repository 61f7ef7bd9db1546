"""A model with compiled kernels in place of its layers. Activations are float32, weights keep their dtype.

Weights are packed once; integers are packed when they are loaded.
"""

from collections.abc import Sequence
from ctypes import Array
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from pagewire.kernels import attention_layer
from pagewire.kernels.cpu.adapters import StepAdapters, UpdateKernel
from pagewire.kernels.cpu.collectives import SharedMemoryCollectives
from pagewire.kernels.cpu.decoder import CompiledDecoder, Form, Layer, Pool, RankPart
from pagewire.kernels.cpu.experts import CompiledExperts
from pagewire.kernels.cpu.kernels import Batch, CpuKernels, Int64
from pagewire.kernels.cpu.packed import Packed, table
from pagewire.services.executor.devices.protocol import StepBatch
from pagewire.services.executor.models.decoder import DecoderLM
from pagewire.services.executor.models.feed_forward import Experts, MixtureOfExperts
from pagewire.services.executor.models.heads import HeadCut
from pagewire.services.executor.models.layers import Activate, PackedLinear, RMSNorm
from pagewire.services.executor.models.model import AttentionFn, CausalLM
from pagewire.services.executor.models.rope import RotaryEmbedding, Rotate
from pagewire.services.executor.models.spec import HeadNorm, Placement


class CompiledAttention(msgspec.Struct, frozen=True):
    """The attention of one step, as an `AttentionFn`. A msgspec struct, which is fast to create."""

    kernels: CpuKernels
    batches: Array[Batch]
    """Rows and block tables by group of layers, from `batches_of`."""
    groups: Sequence[int]
    """Index in `batches` of each layer's group."""
    layers: Sequence[attention_layer.Attention]
    """The constants of each layer's attention."""
    pools: Sequence[Pool]
    """KV pool of each layer."""
    adapted: StepAdapters | None = None
    """The adapters of the step's tokens; None: there are none."""
    step: StepBatch | None = None
    """The step itself."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Writes `k` and `v` to the pool, and returns the attention of `q`."""
        if q.dtype != torch.float32:
            return self(layer, q.float(), k.float(), v.float(), sinks).to(q.dtype)
        batch = self.batches[self.groups[layer]]
        return self.kernels.attend(batch, self.layers[layer], self.pools[layer], q, k, v, sinks)


class CompiledLM(CausalLM):
    """Wraps `model` and replaces its layers in place; `model` must not be used directly afterwards."""

    def __init__(self, model: CausalLM, kernels: CpuKernels, max_model_len: int) -> None:
        super().__init__(model.spec, width=1, tied=True)
        self.vocabulary, self.logit_cap = model.vocabulary, model.logit_cap
        _compile_parts(model, kernels, max_model_len)
        self.model = model
        products = {path: part for path, part in model.named_modules() if isinstance(part, Linear)}
        self.numbers = {path: number for number, path in enumerate(products) if products[path] is not model.lm_head}
        """Numbers of the products but for the output layer, by the paths of their modules."""
        self._updates = Updates(UpdateKernel(kernels))
        for path, number in self.numbers.items():
            products[path].number, products[path].updates = number, self._updates
        shared = None if model.vocabulary is None else model.vocabulary.collectives
        self._ranks = shared if isinstance(shared, SharedMemoryCollectives) else None
        decoder = model if isinstance(model, DecoderLM) and shared is self._ranks else None
        self.decoder = None if decoder is None else _fused(decoder, kernels, self._ranks)
        """All layers as one call; None unless all of them are kernels of this project."""
        self._layers_done = 0
        """Layers whose attention was computed, over all steps; those of `decoder` are not counted."""
        self._logits = torch.empty(0)
        self.head: Linear = model.lm_head or _linear(model.embedding, None, kernels)
        # Looked up once: finding a submodule by its name takes as long as calling it.
        self._argmax = self.head.argmax

    @property
    def embedding(self) -> Tensor:
        """[V, D]."""
        return self.model.embedding

    @override
    def forward(self, token_ids: Tensor, positions: Tensor, attend: AttentionFn) -> Tensor:
        if self.decoder is not None and isinstance(attend, CompiledAttention):
            adapted = attend.adapted
            rows = None if adapted is None else adapted.rows
            return self.decoder(token_ids, positions, attend.batches, attend.pools, rows)
        self._updates.adapted = attend.adapted if isinstance(attend, CompiledAttention) else None

        def count(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
            self._layers_done += 1
            return attend(layer, q, k, v, sinks)

        out: Tensor = self.model(token_ids, positions, count)
        return out

    @property
    @override
    def progress(self) -> float:
        return self._layers_done if self.decoder is None else sum(self.decoder.seconds)

    @override
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns float32 logits. Without `out` the next call overwrites the result: freeing and allocating so much
        memory can take longer than the product.
        """
        if self.vocabulary is not None:
            logits = self.vocabulary.gather(self.head(hidden))
            return self.model.capped(logits if out is None else out.copy_(logits))
        if out is None:
            if len(hidden) > len(self._logits):
                self._logits = torch.empty(len(hidden), self.head.weights.outputs)
            out = self._logits[: len(hidden)]
        return self.model.capped(self.head.forward(hidden, out))

    @override
    def argmax(self, hidden: Tensor) -> Int64 | None:
        if self.logit_cap:
            return None  # capped logits may be equal where these are not, and then the first one counts
        if self.vocabulary is None:
            return self._argmax(hidden)
        if self._ranks is None:
            return None
        largest = torch.empty(len(hidden))
        ids = self._argmax(hidden, largest)
        return self._ranks.first_of_largest(largest, np.where(ids < 0, ids, ids + self.vocabulary.rows.start))


class Embedding(nn.Module):
    """`nn.Embedding` with float32 output."""

    def __init__(self, rows: Packed, weight: Tensor, kernels: CpuKernels) -> None:
        """`rows` hold `weight` [V, D], which itself has no memory if they are integers."""
        super().__init__()
        self.rows, self.weight = rows, weight
        self._kernels = kernels

    def forward(self, ids: Tensor) -> Tensor:
        """[T] -> [T, D]."""
        return self._kernels.embed(self.rows, ids)


class Norm(nn.Module):
    """`RMSNorm` or `LayerNorm` as a compiled kernel."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float, kernels: CpuKernels) -> None:
        """`weight` and `bias` are float32 [width]; without a bias it is RMSNorm."""
        super().__init__()
        self.pair, self.eps = (weight.detach(), None if bias is None else bias.detach()), eps
        self._kernels = kernels

    @property
    def scale(self) -> Tensor:
        """Float32 factors of the features [width]."""
        return self.pair[0]

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] or [T, H, D] -> the same shape."""
        return self._kernels.normalize(x, *self.pair, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the norm of x + residual, and the sum itself."""
        total = x + residual
        return self(total), total


class Activation(nn.Module):
    """`Activate` as a compiled kernel."""

    def __init__(self, plain: Activate, kernels: CpuKernels) -> None:
        super().__init__()
        self.kind, self.gated = plain.kind, plain.gated
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """[T, inputs] -> [T, outputs]; of gates, half as many outputs."""
        return self._kernels.activate(x, self.kind, gated=self.gated)


class Rotary(nn.Module):
    """`RotaryEmbedding` with a table of the cosines and sines of all positions."""

    def __init__(self, plain: RotaryEmbedding, kernels: CpuKernels, max_model_len: int) -> None:
        super().__init__()
        self.table = plain.table(torch.arange(max_model_len))
        self._kernels = kernels

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotate:
        """Returns the rotation of heads at int64 `positions` [T], which is computed in float32."""

        def rotate(x: Tensor) -> Tensor:
            self._kernels.rotate(x, self.table, positions)
            return x

        return rotate


class PackedExperts(nn.Module):
    """`Experts` whose weights are packed already, for `Mixture`."""

    def __init__(self, plain: Experts, pairs: Sequence[tuple[Packed, Packed]]) -> None:
        """`pairs`: of each expert the product of gates and values, and the product of its output."""
        super().__init__()
        self.spec, self.own, self.activation, self.pairs = plain.spec, plain.own, plain.activation, pairs


class Mixture(nn.Module):
    """`MixtureOfExperts` as a compiled kernel."""

    def __init__(self, plain: MixtureOfExperts, kernels: CpuKernels) -> None:
        super().__init__()
        experts: Any = plain.experts
        shared: Any = plain.shared_expert
        common = None
        if shared is not None:
            gate: Any = plain.shared_expert_gate
            common = _weights(shared.up, kernels), _weights(shared.down, kernels), _weights(gate, kernels)
        if isinstance(experts, PackedExperts):
            pairs = experts.pairs
        else:
            pairs = [
                (kernels.pack(up), kernels.pack(down)) for up, down in zip(experts.gate_up, experts.down, strict=True)
            ]
        self.experts = CompiledExperts(
            kernels,
            _weights(plain.gate, kernels),
            pairs,
            common,
            experts.activation.kind,
            experts.spec.chosen,
            normalized=experts.spec.normalized,
            first=experts.own.start,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[T, width] -> [T, width]."""
        return self.experts(x.contiguous())


class Updates:
    """Updates that adapters add to the products of a step."""

    def __init__(self, kernel: UpdateKernel) -> None:
        self.kernel = kernel
        self.adapted: StepAdapters | None = None


class Linear(nn.Module):
    """A matrix product in float32, of a number in the model, by which adapters know it."""

    number = -1
    updates: Updates | None = None

    def __init__(self, weights: Packed, kernels: CpuKernels) -> None:
        super().__init__()
        self.weights = weights
        self._kernels = kernels

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, inputs] -> [T, outputs], written to `out` if it is given."""
        product = self._kernels.linear(x, self.weights, out)
        if self.updates is not None and (adapted := self.updates.adapted) is not None:
            self.updates.kernel(adapted.rows, self.number, x.contiguous(), product)
        return product

    def argmax(self, x: Tensor, largest: Tensor | None = None) -> Int64:
        """[T, inputs] -> [T] index of the largest output, which is written to `largest` [T] if it is given."""
        return self._kernels.linear_argmax(x, self.weights, largest)


def _compiled(module: nn.Module, kernels: CpuKernels, max_model_len: int) -> nn.Module:
    """Returns the replacement of a module; a module without a kernel keeps itself, and its parts are replaced."""
    match module:
        case nn.Linear() | PackedLinear():
            return _linear(module.weight, module.bias, kernels)
        case nn.Embedding():
            return Embedding(table(module.weight), module.weight, kernels)
        case RMSNorm():
            return Norm(module.scale, None, module.eps, kernels)
        case nn.LayerNorm() if module.elementwise_affine:
            return Norm(module.weight.float(), module.bias.float(), module.eps, kernels)
        case Activate():
            return Activation(module, kernels)
        case RotaryEmbedding():
            return Rotary(module, kernels, max_model_len)
        case MixtureOfExperts():
            return Mixture(module, kernels)
        case _:
            _compile_parts(module, kernels, max_model_len)
            return module


def _compile_parts(parent: nn.Module, kernels: CpuKernels, max_model_len: int) -> None:
    """Replaces the parts of a module, one after the other, so that only one part is in memory twice."""
    for name in list(parent._modules):
        if (child := parent._modules[name]) is not None:
            setattr(parent, name, _compiled(child, kernels, max_model_len))
            del child


def _linear(weight: Tensor, bias: Tensor | None, kernels: CpuKernels) -> Linear:
    return Linear(kernels.pack(weight, bias), kernels)


def _weights(module: Any, kernels: CpuKernels) -> Packed:
    """Returns the weights of a product without bias, which may be packed already."""
    return module.weights if isinstance(module, Linear) else kernels.pack(module.weight)


def _fused(model: DecoderLM, kernels: CpuKernels, ranks: SharedMemoryCollectives | None) -> CompiledDecoder:
    """Returns all layers of `model`, whose modules are already replaced, as one call; `ranks` are those of a part."""
    decoder: Any = model.model
    tables = [None if turn is None else decoder.rotaries[turn].table for turn in decoder.turns]
    sizes, groups = model.spec.layers, model.spec.groups.groups
    numbers = [layer.self_attn.qkv.number for layer in decoder.layers]
    layers = [_layer(*parts) for parts in zip(decoder.layers, sizes, groups, numbers, tables, strict=True)]
    spec = model.described
    form = Form(
        eps=spec.eps,
        activation=spec.activation,
        gated=spec.gated,
        parallel=spec.placement is Placement.PARALLEL,
        together=spec.head_norm is HeadNorm.TOGETHER,
        embedding_scale=spec.embedding_scale,
    )
    places = None if decoder.embed_positions is None else decoder.embed_positions.rows
    part = None
    if ranks is not None and model.vocabulary is not None:
        heads: HeadCut = decoder.layers[0].self_attn.cut
        whole, size = heads.whole, heads.whole.head_size
        part = RankPart(ranks, model.vocabulary.rows.start, whole.heads * size, whole.kv_heads * size, heads.holders)
    return CompiledDecoder(kernels, decoder.embed_tokens.rows, places, layers, decoder.norm.pair, form, part)


def _layer(layer: Any, sizes: attention_layer.Attention, group: int, number: int, table: Tensor | None) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        attention=sizes,
        group=group,
        number=number,
        attention_in=layer.attention_in and layer.attention_in.pair,
        attention_out=layer.attention_out and layer.attention_out.pair,
        mlp_in=layer.mlp_in and layer.mlp_in.pair,
        mlp_out=layer.mlp_out and layer.mlp_out.pair,
        q_norm=attention.q_norm and attention.q_norm.pair,
        k_norm=attention.k_norm and attention.k_norm.pair,
        qkv=attention.qkv.weights,
        o=attention.o.weights,
        mlp=mlp.experts if isinstance(mlp, Mixture) else (mlp.up.weights, mlp.down.weights),
        table=table,
    )
