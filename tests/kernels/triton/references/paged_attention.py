"""Attention over a paged KV cache in PyTorch, which the kernel is compared with."""

import torch
import triton

from pagewire.kernels.attention_layer import Attention, Batch


def reference(
    layer: Attention,
    batch: Batch,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns `paged_attention` in float64 [cu_queries[-1], heads, value_head_size]."""
    cu, device = batch.cu_queries.tolist(), query.device
    out = torch.zeros(cu[-1], layer.heads, layer.value_head_size, dtype=torch.float64, device=device)
    for row, (slot, length) in enumerate(zip(batch.slots.tolist(), batch.lengths.tolist(), strict=True)):
        first, last = cu[row], cu[row + 1]
        if length == 0 or first == last:
            continue
        blocks = batch.block_tables[slot, : triton.cdiv(length, key_cache.shape[2])].long()

        def gather(cache: torch.Tensor, blocks: torch.Tensor = blocks, length: int = length) -> torch.Tensor:
            heads = cache[blocks].double().transpose(0, 1).flatten(1, 2)[:, :length]
            return heads.repeat_interleave(layer.group, 0)

        scores = query[first:last].double().transpose(0, 1) @ gather(key_cache).mT * layer.scale
        if layer.soft_cap:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        positions = torch.arange(length, device=device)
        distance = positions[length - (last - first) :, None] - positions
        hidden = (distance < 0) | (distance >= (layer.window or length))
        if layer.chunk:
            hidden |= positions < positions[length - (last - first) :, None] // layer.chunk * layer.chunk
        scores.masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, last - first, 1)), dim=-1)
        weights = scores.softmax(-1)[..., :length]
        out[first:last] = (weights @ gather(value_cache)).transpose(0, 1)
    return out
