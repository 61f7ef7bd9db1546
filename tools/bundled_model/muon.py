"""Muon, the optimiser of the layers' matrices.

Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024, with the scale of Liu et al.,
"Muon is scalable for LLM training", 2025.
"""

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """Momentum SGD in which the update of a matrix is replaced by the nearest orthogonal matrix.

    The scale `0.2 * sqrt(max(rows, columns))` makes updates as large as AdamW's, so that one learning rate suits both
    optimisers.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates the weights. Matrices of equal size are orthogonalised together."""
        for group in self.param_groups:
            sizes: dict[torch.Size, list[Tensor]] = {}
            for weight in group["params"]:
                sizes.setdefault(weight.shape, []).append(weight)
            for size, weights in sizes.items():
                gradients = []
                for weight in weights:
                    state = self.state[weight]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(weight)
                    gradient = cast("Tensor", weight.grad)
                    state["momentum"].lerp_(gradient, 1 - group["momentum"])
                    gradients.append(torch.lerp(gradient, state["momentum"], group["momentum"]))
                scale = group["lr"] * 0.2 * math.sqrt(max(size))
                for weight, update in zip(weights, orthogonal(torch.stack(gradients)), strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)


def orthogonal(x: Tensor) -> Tensor:
    """Approximates the nearest orthogonal matrices with five Newton-Schulz steps."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x
