"""The choice of experts in PyTorch, which the kernel is compared with."""

import torch


def reference(logits: torch.Tensor, count: int, *, normalized: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the results of `choose` in float64 and int64."""
    weights, chosen = logits.double().softmax(-1).topk(count)
    return weights / weights.sum(-1, keepdim=True) if normalized else weights, chosen
