"""Replaces layers of a model by kernels. Matrix products stay in PyTorch."""

from typing import Any

import torch
from torch import Tensor, nn

from pagewire.kernels.triton.attention.rotary_cache import Rotary
from pagewire.kernels.triton.layers.gated import gated
from pagewire.kernels.triton.layers.grouped_linear import grouped_linear
from pagewire.kernels.triton.layers.moe_routing import choose, combine, group
from pagewire.kernels.triton.layers.rms_norm import rms_norm
from pagewire.services.executor.devices.cuda.attention.step_attention import StepAttention
from pagewire.services.executor.models.decoder import DecoderAttention, DecoderLM
from pagewire.services.executor.models.feed_forward import Experts
from pagewire.services.executor.models.layers import Activate, RMSNorm
from pagewire.services.executor.models.model import CausalLM
from pagewire.services.executor.models.rope import Rotate
from pagewire.services.executor.models.spec import HeadNorm


def with_kernels(model: CausalLM, max_model_len: int, device: torch.device) -> CausalLM:
    """Changes `model` in place, moves it to `device` and returns it. `attend` must now be a `StepAttention`."""
    if isinstance(model, DecoderLM):
        decoder = model.model
        rotaries: list[Any] = list(decoder.rotaries)
        tables = [rotary.table(torch.arange(max_model_len)).to(device) for rotary in rotaries]
        layers: list[Any] = list(decoder.layers)
        for layer, turn in zip(layers, decoder.turns, strict=True):
            table = torch.empty(1, 0, device=device) if turn is None else tables[turn]
            layer.self_attn = FusedAttention(layer.self_attn, table)
        decoder.rotaries = nn.ModuleList(Unrotated() for _ in tables)
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if isinstance(module, RMSNorm):
                setattr(parent, name, Norm(module))
            elif isinstance(module, Activate) and module.gated:
                setattr(parent, name, Gated(module))
            elif isinstance(module, Experts):
                setattr(parent, name, GroupedExperts(module))
    return model.to(device)


class FusedAttention(nn.Module):
    """`DecoderAttention` that norms and rotates the heads and writes the KV pool in one pass."""

    def __init__(self, plain: DecoderAttention, angles: Tensor) -> None:
        """`angles` [positions, rotated] is the table of `RotaryEmbedding`; [1, 0]: heads are not rotated."""
        super().__init__()
        self.layer, self.qkv, self.o = plain.layer, plain.qkv, plain.o
        together = plain.head_norm is HeadNorm.TOGETHER
        self.heads_together = plain if together else None
        """Norms all heads as one vector, which the pass cannot."""
        norm = None if together else plain.q_norm
        self._rotary = Rotary(
            plain.heads,
            plain.kv_heads,
            plain.head_dim,
            rotary=angles.shape[1],
            epsilon=1e-6 if norm is None else norm.eps,
        )
        self.scales = nn.ParameterList(
            [] if norm is None or plain.k_norm is None else [norm.scale, plain.k_norm.scale]
        ).requires_grad_(requires_grad=False)
        self._angles = angles

    def forward(self, x: Tensor, _rotate: Rotate, attend: StepAttention) -> Tensor:
        """[T, D] -> [T, D]."""
        packed = self.qkv(x)
        if self.heads_together is not None:
            packed = self.heads_together.normed_row(packed)
        attended = attend.rotated(self.layer, packed, self._rotary, self._angles, list(self.scales))
        out: Tensor = self.o(attended.flatten(1))
        return out


class Unrotated(nn.Module):
    """Replaces `RotaryEmbedding` where the attention rotates its heads itself."""

    def forward(self, _positions: Tensor, _dtype: torch.dtype) -> Rotate:
        """Returns the identity."""
        return lambda x: x


class Norm(nn.Module):
    """`RMSNorm` of rows, as one kernel."""

    def __init__(self, plain: RMSNorm) -> None:
        super().__init__()
        self.weight = nn.Parameter(plain.scale if plain.offset else plain.weight, requires_grad=False)
        self.eps = plain.eps

    @property
    def scale(self) -> Tensor:
        """Float32 factors of the features [width]."""
        return self.weight.float()

    def forward(self, x: Tensor) -> Tensor:
        """[T, width] -> [T, width]."""
        out = torch.empty_like(x)
        rms_norm(x.contiguous(), self.weight, self.eps, out)
        return out

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the norm of x + residual, and the sum itself, which overwrites `residual`."""
        out = torch.empty_like(x)
        rms_norm(x, self.weight, self.eps, out, residual)
        return out, residual


class Gated(nn.Module):
    """`Activate` with gates, as one kernel."""

    def __init__(self, plain: Activate) -> None:
        super().__init__()
        self.kind = plain.kind

    def forward(self, x: Tensor) -> Tensor:
        """[T, 2 inner] -> [T, inner]."""
        out = torch.empty(len(x), x.shape[1] // 2, dtype=x.dtype, device=x.device)
        gated(x, out, self.kind)
        return out


class GroupedExperts(nn.Module):
    """`Experts` whose products are of tokens grouped by expert. Its launches depend on shapes only."""

    def __init__(self, plain: Experts) -> None:
        super().__init__()
        self.spec, self.own, self.kind = plain.spec, plain.own, plain.activation.kind
        self.gate_up, self.down = plain.gate_up, plain.down

    def forward(self, x: Tensor, router_logits: Tensor) -> Tensor:
        """[T, width], [T, count] -> [T, width]. Of several ranks, each returns its summand."""
        weights, chosen = choose(router_logits, self.spec.chosen, normalized=self.spec.normalized)
        groups = group(chosen, self.own)
        raised = grouped_linear(x, self.gate_up, groups, gather=True)
        active = torch.empty(len(raised), raised.shape[1] // 2, dtype=x.dtype, device=x.device)
        gated(raised, active, self.kind, None if len(self.own) == self.spec.count else groups.places)
        return combine(grouped_linear(active, self.down, groups, gather=False), weights, groups)
