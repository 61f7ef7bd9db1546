"""The rotation of heads in PyTorch, which the kernel is compared with."""

import torch

from pagewire.kernels.triton.attention.rotary_cache import Rotary


def reference(
    layer: Rotary,
    packed: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    query_weight: torch.Tensor | None = None,
    key_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns queries [T, heads, head_size], keys and values [T, kv_heads, head_size] of `rotary_cache` in float64."""
    heads = packed.double().reshape(len(packed), -1, layer.head_size)
    cos, sin = table[positions.long()].double()[:, None].chunk(2, -1)

    def turn(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + layer.epsilon) * weight.double()
        front, rest = x[..., : layer.rotary], x[..., layer.rotary :]
        a, b = front.chunk(2, -1)
        front = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return torch.cat((front, rest), -1)

    first_value = layer.heads + layer.kv_heads
    keys = turn(heads[:, layer.heads : first_value], key_weight)
    return turn(heads[:, : layer.heads], query_weight), keys, heads[:, first_value:]
