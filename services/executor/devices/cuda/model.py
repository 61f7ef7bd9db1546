"""A model with kernels in place of those layers that have one. Matrix products stay with PyTorch."""

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
    """`model` itself, moved to `device` and changed: its `attend` must be a `TritonAttention` from now on."""
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
    """`Attention`: norms and rotation of the heads and the write into the KV pool are one pass."""

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
    """`RotaryEmbedding` where the attention turns its heads itself."""

    def forward(self, _positions: Tensor, _dtype: torch.dtype) -> Rotate:
        """Leaves heads as they are."""
        return lambda x: x


class Norm(nn.Module):
    """`RMSNorm` of hidden states."""

    def __init__(self, plain: RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = plain.weight, plain.eps

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `RMSNorm.add`: one pass, in which the sum overwrites `residual`."""
        out = torch.empty_like(x)
        rms_norm(x, self.weight, self.eps, out, residual)
        return out, residual


class Activation(nn.Module):
    """`SiluMul`."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, 2 inner] -> [T, inner]."""
        out = torch.empty(len(x), x.shape[1] // 2, dtype=x.dtype, device=x.device)
        silu_mul(x, out)
        return out
