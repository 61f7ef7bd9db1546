"""Low-rank updates of a product in PyTorch, which the kernels are compared with."""

from collections.abc import Sequence

import torch

from pagewire.kernels.low_rank import LowRank


def reference(x: torch.Tensor, out: torch.Tensor, adapters: Sequence[Sequence[LowRank] | None]) -> torch.Tensor:
    """Returns `out` [T, outputs] with the updates of each token's adapter, in float64."""
    total = out.double().clone()
    for token, updates in enumerate(adapters):
        for one in updates or ():
            narrow = one.shrink.double() @ x[token].double()
            total[token, one.first : one.first + len(one.expand)] += one.scale * (one.expand.double() @ narrow)
    return total
