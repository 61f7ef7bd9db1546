"""Replaces layers of a model by kernels. Matrix products stay in PyTorch."""

import torch
from torch import Tensor, nn

from pagewire.kernels.rms_norm import rms_norm
from pagewire.kernels.rotary_cache import Rotary
from pagewire.kernels.silu_mul import silu_mul
from pagewire.services.executor.devices.cuda.attention import TritonAttention
from pagewire.services.executor.models.decoder import Attention
from pagewire.services.executor.models.layers import RMSNorm, SiluMul
from pagewire.services.executor.models.model import CausalLM
from pagewire.services.executor.models.rope import RotaryEmbedding, Rotate


def with_kernels(model: CausalLM, max_model_len: int, device: torch.device) -> CausalLM:
    """Changes `model` in place, moves it to `device` and returns it. `attend` must now be a `TritonAttention`."""
    positions = torch.arange(max_model_len)
    rotaries = [module for module in model.modules() if isinstance(module, RotaryEmbedding)]
    angles = rotaries[0].table(positions).to(device) if rotaries else torch.empty(0)
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if isinstance(module, Attention):
                setattr(parent, name, FusedAttention(module, angles))
            elif isinstance(module, RotaryEmbedding):
                setattr(parent, name, Unrotated())
            elif isinstance(module, RMSNorm):
                setattr(parent, name, Norm(module))
            elif isinstance(module, SiluMul):
                setattr(parent, name, Activation())
    return model.to(device)


class FusedAttention(nn.Module):
    """`Attention` that norms and rotates the heads and writes the KV pool in one pass."""

    def __init__(self, plain: Attention, angles: Tensor) -> None:
        super().__init__()
        self.layer = plain.layer
        self.qkv_proj, self.o_proj = plain.qkv_proj, plain.o_proj
        self.q_norm, self.k_norm = plain.q_norm, plain.k_norm
        eps = 1e-6 if plain.q_norm is None else plain.q_norm.eps
        self._rotary = Rotary(plain.heads, plain.kv_heads, plain.head_dim, rotary=plain.head_dim, epsilon=eps)
        self._angles = angles

    def forward(self, x: Tensor, _rotate: Rotate, attend: TritonAttention) -> Tensor:
        """[T, D] -> [T, D]."""
        norms = [None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm)]
        attended = attend.rotated(self.layer, self.qkv_proj(x), self._rotary, self._angles, norms)
        out: Tensor = self.o_proj(attended.flatten(1))
        return out


class Unrotated(nn.Module):
    """Replaces `RotaryEmbedding` where the attention rotates its heads itself."""

    def forward(self, _positions: Tensor, _dtype: torch.dtype) -> Rotate:
        """Returns the identity."""
        return lambda x: x


class Norm(nn.Module):
    """`RMSNorm` of hidden states, as one kernel."""

    def __init__(self, plain: RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = plain.weight, plain.eps

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `RMSNorm.add`. The sum overwrites `residual`."""
        out = torch.empty_like(x)
        rms_norm(x, self.weight, self.eps, out, residual)
        return out, residual


class Activation(nn.Module):
    """`SiluMul` as one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, 2 inner] -> [T, inner]."""
        out = torch.empty(len(x), x.shape[1] // 2, dtype=x.dtype, device=x.device)
        silu_mul(x, out)
        return out
