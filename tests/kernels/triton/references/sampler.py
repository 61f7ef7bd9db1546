"""The sampling of tokens in PyTorch, which the kernel is compared with."""

import torch

from pagewire.kernels.triton.sampling.sampling_columns import SamplingColumns
from pagewire.shared import sampling_parameters
from tests.kernels.triton.references import philox


def distribution(table: SamplingColumns, logits: torch.Tensor, slot: int) -> torch.Tensor:
    """Returns a row's filtered probabilities, float64 [vocabulary], not renormalised; one-hot for a greedy slot."""
    x, columns = logits.double(), table.columns
    temperature = float(columns["temperature"][slot])
    if temperature == 0:
        return torch.nn.functional.one_hot(x.argmax(), len(x)).double()
    p = (x / temperature).softmax(-1)
    p = torch.where(p >= p.max() * float(columns["min_p"][slot]), p, 0)
    if 0 < (top_k := int(columns["top_k"][slot])) < len(p):
        p = torch.where(p >= p.topk(top_k).values[-1], p, 0)
    if (top_p := float(columns["top_p"][slot])) < 1:
        ordered = p.sort(descending=True).values
        before = ordered.cumsum(0) - ordered
        p = torch.where(p >= ordered[before < top_p * p.sum()][-1], p, 0)
    return p


def reference(
    table: SamplingColumns,
    logits: torch.Tensor,
    slots: torch.Tensor,
    ends: torch.Tensor,
) -> list[int]:
    """Returns `tokens` of `sample`, computed in float64."""
    tokens = []
    for row, (slot, end) in enumerate(zip(slots.tolist(), ends.tolist(), strict=True)):
        if end < 0:
            tokens.append(-1)
            continue
        if not logits[row].max().isfinite():
            tokens.append(sampling_parameters.NOT_FINITE)
            continue
        reached = distribution(table, logits[row], slot).cumsum(0)
        u = philox.reference(int(table.columns["key"][slot]) & 0xFFFF_FFFF_FFFF_FFFF, end)
        tokens.append(int((reached > u * reached[-1]).nonzero()[0]))
    return tokens
